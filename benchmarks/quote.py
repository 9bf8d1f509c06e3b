"""Puts measured figures into both READMEs, between their markers: nothing there is typed by hand.

    python benchmarks/quote.py [--demo RUN]

Reads benchmarks/results/{demo,accuracy-cpu,speed-cpu}.json; ``--demo`` first writes demo.json from a run's folder.
"""

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

from accuracy_cpu import commit, error, machine

HERE = Path(__file__).parent
RESULTS, ROOT = HERE / "results", HERE.parent

WORDS = {
    "en": {
        "demo": "On {machine}, {date}: {steps} steps in {train:.0f} s of steps ({whole:.0f} s with model, rehearsal and "
        "evaluation), {rate:.0f} tokens/s. Loss on held-out answers **{before:.3f} → {after:.3f}**. "
        "Predicted peak {predicted:.1f} MiB, measured {measured:.1f} MiB.",
        "asked": "One held-out function, before and after:",
        "accuracy": "{n} runs of the real 135M model on a CPU (LoRA and full, fp32 and bf16, with and without "
        "checkpointing): largest error of the predicted peak **{worst:.2f} %**.",
        "speed": "| tool | setting | real tokens/s (min, median, max) | peak above the loaded model |",
        "job": "{job}; {machine}, 2 threads, {date}. Paired runs, each tool in its own environment. "
        "finefit against the faster peer: **{ratio:.2f}×** the tokens per second at **{share:.0f} %** of the leaner "
        "one's memory. The goals were 2× at 50 %. LLaMA-Factory's packing fills rows of its own choice, so its steps are "
        "other batches. Loss per step against TRL on the same batches: at most {loss:.2f} % apart. Of a step's operator time "
        "{gemm:.0f} % are matrix products, {attention:.0f} % attention, {loss_share:.0f} % the loss, {rest:.0f} % the rest; "
        "products run at {reached:.0f} GFLOP/s over the whole step, this machine's bf16 rate is {peak:.0f}.",
    },
    "zh": {
        "demo": "{machine}，{date}：{steps} 步训练用时 {train:.0f} 秒（含加载模型、预演与评估共 {whole:.0f} 秒），每秒 {rate:.0f} 个词元。"
        "留出集答案上的损失 **{before:.3f} → {after:.3f}**。预测峰值 {predicted:.1f} MiB，实测 {measured:.1f} MiB。",
        "asked": "一个留出的函数，训练前与训练后：",
        "accuracy": "真实 135M 模型在 CPU 上的 {n} 次运行（LoRA 与全量，fp32 与 bf16，有无激活检查点）：预测峰值的最大误差 **{worst:.2f} %**。",
        "speed": "| 工具 | 设置 | 每秒真实词元（最小、中位、最大） | 超出已加载模型的内存峰值 |",
        "job": "{job}；{machine}，2 线程，{date}。成对运行，各工具使用自己的环境。与较快的对手相比，finefit 每秒词元为其 **{ratio:.2f} 倍**，"
        "内存为较省者的 **{share:.0f} %**。目标是 2 倍与 50 %。LLaMA-Factory 的打包自行选择每行的样本，因此它的批次不同。"
        "在相同批次上，每步损失与 TRL 相差不超过 {loss:.2f} %。一步的算子时间里矩阵乘法占 {gemm:.0f} %，注意力 {attention:.0f} %，损失 {loss_share:.0f} %，"
        "其余 {rest:.0f} %；按整步计乘法速率为 {reached:.0f} GFLOP/s，本机 bf16 实测速率为 {peak:.0f}。",
    },
}


def demo_of(run: Path) -> dict[str, Any]:
    """The figures of a finished run."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    end, memory = ([e for e in events if e["event"] == name][-1] for name in ("end", "memory"))
    samples = [e["sample"] for e in events if e["event"] == "eval" and "sample" in e]
    return {
        "steps": end["step"], "train": sum(e["seconds"] for e in steps), "whole": end["seconds"],
        "rate": sum(e["tokens"] for e in steps) / sum(e["seconds"] for e in steps),
        "before": end["loss_before"], "after": end["loss_after"],
        "predicted": memory["predicted"]["peak_bytes"] / 2**20, "measured": memory["measured"]["peak_bytes"] / 2**20,
        "prompt": samples[0]["prompt"], "answers": [s["answer"] for s in samples], "reference": samples[0]["reference"],
        "machine": machine(), "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }  # fmt: skip


def demo(words: dict[str, str]) -> str:
    made = json.loads((RESULTS / "demo.json").read_text())
    code = made["prompt"].partition("```")[2].partition("\n")[2].rpartition("```")[0].strip("\n")
    answers = "\n\n".join(f"{arrow} {text.strip()}" for arrow, text in zip("–+", made["answers"], strict=False))
    return f"{words['demo'].format(**made)}\n\n{words['asked']}\n\n```text\n{code}\n\n{answers}\n```"


def accuracy(words: dict[str, str]) -> str:
    rows = json.loads((RESULTS / "accuracy-cpu.json").read_text())["rows"]
    return words["accuracy"].format(n=len(rows), worst=100 * max(abs(error(row)) for row in rows))


def speed(words: dict[str, str]) -> str:
    rows = json.loads((RESULTS / "speed-cpu.json").read_text())
    lines = [words["speed"], "|---|---|---:|---:|"]
    for row in rows:
        rate = row["real_tokens_per_s"]
        shown = {"micro_batch_tokens", "micro_batch", "packing", "checkpointing"}
        setting = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in row["setting"].items() if k in shown)
        peak = f"{row['peak_above_model_bytes'] / 1e6:.0f} MB"
        rates = f"{rate['min']:.0f}, **{rate['median']:.0f}**, {rate['max']:.0f}"
        lines.append(f"| {row['tool']} {row['tool_version']} | {setting} | {rates} | {peak} |")
    ours = next(row for row in rows if row["tool"] == "finefit")
    peers = [row for row in rows if row["tool"] != "finefit"]
    same = next(row for row in peers if row["tool"] == "TRL")
    ratio = ours["real_tokens_per_s"]["median"] / max(row["real_tokens_per_s"]["median"] for row in peers)
    share = 100 * ours["peak_above_model_bytes"] / min(row["peak_above_model_bytes"] for row in peers)
    apart = 100 * max(abs(a / b - 1) for a, b in zip(ours["losses"], same["losses"], strict=True))
    return (
        "\n".join(lines)
        + "\n\n"
        + words["job"].format(**ours, ratio=ratio, share=share, loss=apart, **_where_time_goes())
    )


def _where_time_goes() -> dict[str, float]:
    made = json.loads((RESULTS / "profile-cpu.json").read_text())
    shares = {part: 100 * share for part, share in made["shares"].items()}
    shares["loss_share"] = shares.pop("loss")
    return {**shares, "reached": made["flops_per_s"] / 1e9, "peak": made["measured_bf16_flops_per_s"] / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--demo", type=Path, help="folder of a finished demo run")
    given = parser.parse_args()
    if given.demo:
        (RESULTS / "demo.json").write_text(json.dumps(demo_of(given.demo), indent=1) + "\n")
    for language, name in (("en", "README.md"), ("zh", "README.zh-CN.md")):
        page = ROOT / name
        text = page.read_text()
        for mark, make in (("demo", demo), ("accuracy", accuracy), ("speed", speed)):
            made = make(WORDS[language])
            text = re.sub(
                rf"(<!-- {mark} -->\n).*?(\n?<!-- /{mark} -->)",
                lambda m, made=made: f"{m[1]}{made}\n<!-- /{m[2].rpartition('/')[2]}",
                text, flags=re.DOTALL,
            )  # fmt: skip
        page.write_text(text)


if __name__ == "__main__":
    main()
