"""The accuracy report: predictions of published cases beside what was published, as numbers, a picture and a table.

    python benchmarks/accuracy_report.py PREDICTIONS.jsonl

Writes benchmarks/results/accuracy-published.json, docs/accuracy-published.svg and the tables between the marks of
docs/en/accuracy.md and docs/zh/accuracy.md. ``accuracy.py`` calls it when it ran over the project's own copy.
"""

import json
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from published_words import CONTRADICTED, CORRECTED  # noqa: E402

from accuracy import CASES, error_of, is_right  # noqa: E402
from accuracy_cpu import commit  # noqa: E402

Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
RESULTS = HERE / "results" / "accuracy-published.json"


def summary_of(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Errors of peaks and verdicts of some cases."""
    errors = sorted(abs(e) for pair in pairs if (e := error_of(*pair)) is not None)
    verdicts = [right for pair in pairs if (right := is_right(*pair)) is not None]
    out: dict[str, Any] = {"cases": len(pairs), "refused": sum(line["refused"] is not None for _, line in pairs)}
    if errors:
        out |= {
            "peaks": len(errors), "median": statistics.median(errors), "p90": errors[math.ceil(0.9 * len(errors)) - 1],
            "worst": errors[-1], "within_8_percent": sum(e <= 0.08 for e in errors) / len(errors),
        }  # fmt: skip
    if verdicts:
        out |= {"verdicts": len(verdicts), "verdicts_right": sum(verdicts) / len(verdicts)}
    return out


def dangerous(pairs: Sequence[Pair]) -> list[str]:
    """Cases published as out of memory that are said to fit with more than 3 % to spare."""
    return [
        r["id"]
        for r, line in pairs
        if r["oom"] and line["fits"] and line["needed_bytes"] < 0.97 * r["gpu_total_gib"] * 2**30
    ]


def grouped(pairs: Sequence[Pair], key: Callable[[Mapping[str, Any]], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(key(pair[0]), []).append(pair)
    return {name: summary_of(found) for name, found in sorted(groups.items())}


def results(pairs: Sequence[Pair]) -> dict[str, Any]:
    best = [pair for pair in pairs if pair[0]["grade"] in "AB"]
    return {
        "commit": commit(), "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "by_grade": grouped(pairs, lambda r: r["grade"]),
        "by_source_a_and_b": grouped(best, lambda r: r["group"]),
        "by_method_a_and_b": grouped(best, lambda r: r["method"]),
        "by_sharding_a_and_b": grouped(best, lambda r: f"{(r['parallel'] or {}).get('impl') or 'one device'}"),
        "by_checkpointing_a_and_b": grouped(best, lambda r: str(r["checkpointing"])),
        "said_to_fit_but_published_as_out_of_memory": dangerous(best),
        "records_corrected": [r["id"] for r, _ in pairs if r["id"] in CORRECTED],
        "refused_because": dict(Counter(line["refused"] for _, line in pairs if line["refused"])),
        "cases": [
            {"id": r["id"], "grade": r["grade"], "published_gib": r["peak_gib"], "reading": r["memory_kind"],
             "predicted_gib": line["peak_bytes"] and round(line["peak_bytes"] / 2**30, 3),
             "error": error_of(r, line), "oom": r["oom"], "fits": line["fits"], "refused": line["refused"]}
            for r, line in pairs
        ],
    }  # fmt: skip


def table(found: Mapping[str, Any], words: Mapping[str, str]) -> str:
    head = [words[w] for w in ("what", "peaks", "median", "p90", "within", "verdicts")]
    lines = [f"| {' | '.join(head)} |", "|---|---:|---:|---:|---:|---:|"]
    rows = [(f"{words['grade']} {name}", row) for name, row in found["by_grade"].items()]
    rows += [(f"{name} (A, B)", row) for name, row in found["by_source_a_and_b"].items()]
    for name, row in rows:
        peaks = (
            [str(row["peaks"]), *(f"{100 * row[k]:.1f} %" for k in ("median", "p90"))] if "peaks" in row else ["–"] * 3
        )
        within = f"{100 * row['within_8_percent']:.0f} %" if "peaks" in row else "–"
        right = f"{100 * row['verdicts_right']:.0f} % of {row['verdicts']}" if "verdicts" in row else "–"
        lines.append(f"| {name} | {' | '.join([*peaks, within, right])} |")
    return "\n".join(lines)


def picture(pairs: Sequence[Pair]) -> str:
    """Predicted against published GiB on logarithmic axes, a point a case; the diagonal is perfect, the band 8 %."""
    from math import log10

    size, edge, low, high = 560, 46, 2.0, 130.0

    def at(gib: float) -> float:
        return edge + (size - 2 * edge) * (log10(gib) - log10(low)) / (log10(high) - log10(low))

    out = [f'<rect width="{size}" height="{size}" fill="#fff"/>']
    corners = [(low, low * 0.92), (high, high * 0.92), (high, high * 1.08), (low, low * 1.08)]
    band = " ".join(f"{at(x):.1f},{size - at(max(y, low * 0.9)):.1f}" for x, y in corners)
    out.append(f'<polygon points="{band}" fill="#e8eef7"/>')
    out.append(f'<path d="M{at(low)} {size - at(low)} L{at(high)} {size - at(high)}" stroke="#9ab" fill="none"/>')
    for tick in (2, 4, 8, 16, 32, 64, 128):
        out.append(f'<text x="{at(tick):.0f}" y="{size - edge + 18}" text-anchor="middle">{tick}</text>')
        out.append(f'<text x="{edge - 8}" y="{size - at(tick) + 4:.0f}" text-anchor="end">{tick}</text>')
    colours = {"A": "#1b6ca8", "B": "#d08a1d", "C": "#c8c8c8"}
    for grade in "CBA":
        for record, line in pairs:
            if record["grade"] == grade and error_of(record, line) is not None:
                x, y = at(max(record["peak_gib"], low)), size - at(max(line["peak_bytes"] / 2**30, low))
                out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[grade]}" fill-opacity="0.75"/>')
    for i, (grade, colour) in enumerate(colours.items()):
        out.append(f'<circle cx="{edge + 14}" cy="{edge + 10 + 18 * i}" r="4" fill="{colour}"/>')
        out.append(f'<text x="{edge + 24}" y="{edge + 14 + 18 * i}">grade {grade}</text>')
    out.append(f'<text x="{size / 2}" y="{size - 8}" text-anchor="middle">published, GiB</text>')
    out.append(f'<text transform="translate(14 {size / 2}) rotate(-90)" text-anchor="middle">predicted, GiB</text>')
    style = "<style>text{font:12px sans-serif;fill:#222}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}">{style}{"".join(out)}</svg>\n'


def against(pairs: Sequence[Pair], words: Mapping[str, str]) -> str:
    """Published as out of memory and said to fit, with what speaks against the one or the other."""
    named = set(dangerous([pair for pair in pairs if pair[0]["grade"] in "AB"]))
    rows = [f"| {words['case']} | {words['needs']} | {words['card']} | {words['why']} |", "|---|---:|---:|---|"]
    for record, line in pairs:
        if record["id"] in named:
            said = CONTRADICTED.get(record["id"])
            why = said[words["language"]] if said else words["open"]
            cells = f"{line['needed_bytes'] / 2**30:.1f} GiB | {record['gpu_total_gib']} GiB | {why}"
            rows.append(f"| {record['id']} ({record['source']}) | {cells} |")
    return "\n".join(rows)


def corrected(pairs: Sequence[Pair], words: Mapping[str, str]) -> str:
    """Records that said something else than their own source does."""
    rows = [f"| {words['record']} | {words['now']} | {words['card']} | {words['needs']} |", "|---|---|---:|---:|"]
    for record, line in pairs:
        if said := CORRECTED.get(record["id"]):
            cells = f"{record['gpu_total_gib']} GiB | {line['needed_bytes'] / 2**30:.1f} GiB"
            rows.append(f"| {record['id']} ({record['source']}) | {said[words['language']]} | {cells} |")
    return "\n".join(rows)


WORDS = {
    "en": {"language": "en", "record": "record", "now": "is now", "what": "cases", "peaks": "peaks", "median": "median error", "p90": "90th percentile", "within": "within 8 %",
           "verdicts": "fits or not, right", "grade": "grade", "case": "published as out of memory", "needs": "predicted need",
           "card": "card", "why": "what we know", "open": "not explained"},
    "zh": {"language": "zh", "record": "记录", "now": "现为", "what": "案例", "peaks": "峰值数", "median": "误差中位数", "p90": "第 90 百分位", "within": "误差 8 % 以内",
           "verdicts": "能否放下，判断正确", "grade": "等级", "case": "公布为内存不足", "needs": "预测所需", "card": "显卡",
           "why": "我们知道的", "open": "尚未解释"},
}  # fmt: skip


def write(pairs: Sequence[Pair]) -> None:
    found = results(pairs)
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    docs = HERE.parent / "docs"
    (docs / "accuracy-published.svg").write_text(picture(pairs))
    for language, words in WORDS.items():
        page = docs / language / "accuracy.md"
        text = page.read_text()
        written = {
            "published": table(found, words),
            "against": against(pairs, words),
            "corrected": corrected(pairs, words),
        }
        for mark, lines in written.items():
            between = rf"(<!-- {mark} -->\n).*?\n?(<!-- /{mark} -->)"
            text = re.sub(between, lambda m, lines=lines: f"{m[1]}{lines}\n{m[2]}", text, flags=re.S)  # type: ignore[misc]
        page.write_text(text)


def main(path: str) -> None:
    lines = {line["id"]: line for line in map(json.loads, Path(path).read_text().splitlines())}
    records = [json.loads(text) for text in CASES.read_text().splitlines()]
    write([(r, lines[r["id"]]) for r in records if r["id"] in lines])


if __name__ == "__main__":
    main(*sys.argv[1:])
