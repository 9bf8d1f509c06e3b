"""Writes ``docs/*/reference/fits.md``: what can be trained on a card of 8 to 80 GB, by `finefit.fits`.

    python scripts/fits_page.py

One usual card stands for each size. Declines to show models of which nothing fits a card.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finefit.fits import fits
from finefit.hardware import HardwareSpec
from finefit.terminal.fitting import by_model, words
from finefit.terminal.listing import count_text
from finefit.units import format_bytes

DOCS = Path(__file__).resolve().parent.parent / "docs"
CARDS = (
    ("8 GB", "RTX 4060"), ("12 GB", "RTX 3060"), ("16 GB", "RTX 4060 Ti 16GB"), ("24 GB", "RTX 4090"),
    ("48 GB", "L40S"), ("80 GB", "A100 80GB"),
)  # fmt: skip
MADE = "<!-- made by scripts/fits_page.py: run it again after a change of the predictor or the catalogue -->"
WORDS: dict[str, dict[str, str]] = {
    "en": {
        "title": "What fits which card",
        "says": "For each model and method: the longest example that fits, in tokens (k = 1,024, in steps of 512), and the predicted "
        "tokens per second at 2k tokens, or at that length where it is shorter. One example at a time, 16 to a step, "
        "rank 16, as many blocks checkpointed as needed, 4 % of the card left free. `-`: not even 512 tokens fit. `?`: "
        "not known without a trace of the model. `x`: the method does not take this model. All figures are predicted: speeds come from data sheets and are good "
        "for comparing, not for booking machines. For your own card and in exact numbers:",
        "card": "{size}, as the {name}", "used": "{used} of {whole} used.",
        "model": "model", "parameters": "parameters",
    },
    "zh": {
        "title": "哪张卡能训练什么",
        "says": "每个模型、每种方法：放得下的最长样本（词元数，k = 1,024，以 512 为步长），以及在 2k 词元"
        "（更短时按该长度）时预测的每秒词元数。一次一个样本，每步 16 个，秩 16，按需重算若干层的激活，"
        "留出显存的 4 %。`-`：连 512 个词元也放不下。`?`：要先追踪一次模型才知道。`x`：该方法不适用于这个模型。"
        "所有数字都是预测值：速度来自产品规格，适合比较，不适合据此租机器。自己的卡和精确数字：",
        "card": "{size}，例如 {name}", "used": "可用 {used}，共 {whole}。",
        "model": "模型", "parameters": "参数",
    },
}  # fmt: skip


def pages() -> dict[Path, str]:
    """Path and text of the page in both languages."""
    found = [(size, fits(HardwareSpec.from_name(name))) for size, name in CARDS]
    return {DOCS / lang / "reference" / "fits.md": page(lang, found) for lang in WORDS}


def page(lang: str, found: list[tuple[str, dict[str, Any]]]) -> str:
    said = WORDS[lang]
    parts = [MADE, f"# {said['title']}", said["says"], '```sh\nfinefit fits "RTX 4090"\nfinefit fits 24GB --json\n```']
    for size, one in found:
        used, whole = format_bytes(one["budget_bytes"]), format_bytes(one["memory_bytes"])
        heading = said["card"].format(size=size, name=one["device"])
        parts += [f"## {heading}", said["used"].format(used=used, whole=whole), table(one, said)]
    return "\n\n".join(parts) + "\n"


def table(found: Mapping[str, Any], said: Mapping[str, str]) -> str:
    head = [said["model"], said["parameters"], *(part for method in found["methods"] for part in (method, "tokens/s"))]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, by_method in by_model(found).items():
        cells = [cell for method in found["methods"] for cell in words(by_method[method])]
        lines.append([name, count_text(by_method[found["methods"][0]]["parameters"]), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
