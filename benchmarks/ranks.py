"""finefit on several gloo ranks against accelerate and DeepSpeed, one job in paired rounds.

    python benchmarks/ranks.py [--rounds 3] [--steps 4] [--ways "finefit zero3,fsdp2,..."] [--python PATH] [--out FILE]

Full fine-tuning of SmolLM2-135M-Instruct: the same examples in the same order for all, a share of each global batch to each
rank, one thread a rank, AdamW, clipped. finefit packs a rank's examples into rows; the others pad a micro-batch to its
longest, as the Trainer's collators do. All of them fit whatever they are given, so micro-batches are as large.

The ways: finefit's own engines, and its DeepSpeed engine; transformers' Trainer under accelerate (whose FSDP is without a
word DDP on a CPU: each result says what really wrapped the model), plain FSDP2 as accelerate would run it on a device that it
takes; the Trainer with DeepSpeed. What needs deepspeed runs by ``--python``, an interpreter that has it.

Each round runs every way once, in turn, so a drifting machine drifts for all. The first step of each is not counted. RSS is
read with an allocator that gives memory back at once, the same for all. Writes benchmarks/results/ranks-cpu.json.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from accuracy_cpu import commit, machine

HERE = Path(__file__).parent
RESULT = HERE / "results" / "ranks-cpu.json"
TABLE = re.compile(r"(<!-- ranks-speed -->\n).*?(<!-- /ranks-speed -->)", re.DOTALL)
HEADS = {
    "en": ("way", "wrapped by", "real tokens/s (min, median, max)", "most resident of a rank"),
    "zh": ("方式", "由谁包装", "真实 tokens/s（最小、中位、最大）", "单个 rank 最大常驻内存"),
}
MODEL = "SmolLM2-135M-Instruct"
EXAMPLES, GLOBAL_BATCH, MICRO, RATE, MAX_NORM, LONGEST = 512, 8, 2, 2e-5, 1.0, 512
# what is run: (kind, settings)
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "finefit data parallel": ("finefit", {"replicas": 2}),
    "finefit zero1": ("finefit", {"shards": 2, "stage": 1}),
    "finefit zero2": ("finefit", {"shards": 2, "stage": 2}),
    "finefit zero3": ("finefit", {"shards": 2, "stage": 3}),
    "finefit zero2 by deepspeed": ("finefit", {"shards": 2, "stage": 2, "engine": "deepspeed"}),
    "finefit zero3 by deepspeed": ("finefit", {"shards": 2, "stage": 3, "engine": "deepspeed"}),
    "Trainer DDP": ("trainer", {}),
    "Trainer FSDP": ("trainer", {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}),
    "Trainer DeepSpeed zero2": ("trainer", {"deepspeed": 2}),
    "Trainer DeepSpeed zero3": ("trainer", {"deepspeed": 3}),
    "fsdp2 zero2": ("fsdp2", {"reshard": False}),
    "fsdp2 zero3": ("fsdp2", {"reshard": True}),
}
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000", "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu",
    "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}  # fmt: skip
_LIMIT_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", metavar="WAY", help=argparse.SUPPRESS)  # one of the processes that are measured
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--python", default=sys.executable, help="an interpreter with deepspeed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="that are counted, after one that is not")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    if given.rank:
        measured(given)
        return
    ways = [way for way in WAYS if way in given.ways.split(",")]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(given.rounds):
        for way in ways:
            made = launched(way, given)
            found[way].append(made)
            said = (
                made.get("error")
                or f"{made['tokens_per_s']:.0f} tokens/s, {made['peak_rss_bytes'] / 1e6:.0f} MB a rank"
            )
            print(f"round {number + 1}: {way}: {said}", flush=True)
    given.out.write_text(json.dumps([row(way, found[way], given) for way in ways], indent=1) + "\n")
    if given.out == RESULT:
        write_tables(json.loads(RESULT.read_text()))


def write_tables(rows: list[dict[str, Any]]) -> None:
    """The rows as the tables of both pages, the fastest first."""
    for lang, head in HEADS.items():
        path = HERE.parent / "docs" / lang / "concepts" / "several_devices.md"
        lines = [f"| {' | '.join(head)} |", "|---|---|---:|---:|"]
        for one in sorted((r for r in rows if "error" not in r), key=lambda r: -r["real_tokens_per_s"]["median"]):
            rates = one["real_tokens_per_s"]
            speed = f"{rates['min']:.0f}, **{rates['median']:.0f}**, {rates['max']:.0f}"
            lines.append(f"| {one['way']} | {one['wrapped_by']} | {speed} | {one['peak_rss_bytes'] / 1e6:,.0f} MB |")
        first = rows[0]
        lines += ["", f"{first['job']}; {first['machine']}, {first['date']}, torch {first['versions']['torch']}."]
        told = "\n".join(lines)
        text = TABLE.sub(lambda mark, told=told: f"{mark[1]}{told}\n{mark[2]}", path.read_text("utf-8"))
        path.write_text(text, "utf-8")


def row(way: str, rounds: list[dict[str, Any]], given: argparse.Namespace) -> dict[str, Any]:
    done = [one for one in rounds if "error" not in one]
    about = {
        "job": f"{MODEL}, full, {given.precision}, {given.ranks} gloo ranks of one thread, global batch {GLOBAL_BATCH}",
        "way": way, "rounds": len(rounds), "steps": given.steps, "machine": machine(), "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    if not done:
        return {**about, "error": rounds[-1]["error"]}
    rates = sorted(one["tokens_per_s"] for one in done)
    return {
        **about, "wrapped_by": done[0]["wrapped_by"], "versions": done[0]["versions"], "losses": done[0]["losses"],
        "real_tokens_per_s": {"min": rates[0], "median": statistics.median(rates), "max": rates[-1]},
        "real_tokens_per_s_of_rounds": [one["tokens_per_s"] for one in done],
        "peak_rss_bytes": max(one["peak_rss_bytes"] for one in done),
        "rss_before_training_bytes": max(one["rss_before_bytes"] for one in done),
    }  # fmt: skip


def launched(way: str, given: argparse.Namespace) -> dict[str, Any]:
    """The ranks of one way, by torch's launcher; of what they say the slowest rank's time and the largest memory."""
    python = given.python if "deepspeed" in way.lower() else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        command = [
            python,
            "-W",
            "ignore",
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={given.ranks}",
        ]
        command += [str(HERE / "ranks.py"), "--rank", way, "--steps", str(given.steps), "--precision", given.precision]
        environment = {**os.environ, **_ENVIRONMENT, "RANKS_OUT": folder}
        done = subprocess.run(
            [*command, "--ranks", str(given.ranks)], env=environment, capture_output=True, text=True, timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if done.returncode or len(told) < given.ranks:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"error": (lines or done.stderr.splitlines() or ["no word"])[0][:300]}
    tokens, seconds = sum(one["tokens"] for one in told), max(one["seconds"] for one in told)
    return {
        **told[0], "tokens_per_s": tokens / seconds, "peak_rss_bytes": max(one["peak_rss_bytes"] for one in told),
        "rss_before_bytes": max(one["rss_before_bytes"] for one in told),
    }  # fmt: skip


# In a rank


def measured(given: argparse.Namespace) -> None:
    kind, settings = WAYS[given.rank]
    made = {"finefit": by_finefit, "trainer": by_trainer, "fsdp2": by_fsdp2}[kind](settings, given)
    versions = {name: _version(name) for name in ("torch", "transformers", "accelerate", "deepspeed", "finefit")}
    peak = next(
        int(x.split()[1]) * 1024 for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")
    )
    told = {**made, "peak_rss_bytes": peak, "versions": {name: v for name, v in versions.items() if v}}
    Path(os.environ["RANKS_OUT"], f"{os.environ['RANK']}.json").write_text(json.dumps(told))


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def examples(count: int) -> list[tuple[list[int], list[int]]]:
    """(ids, mask) of the embedded data set, the first of it; the same for every way."""
    from transformers import AutoTokenizer

    from finefit.assets import model_folder
    from finefit.data.readers import open_source
    from finefit.data.tokens import prepare

    tokenizer = AutoTokenizer.from_pretrained(model_folder(MODEL).folder)
    store = prepare(open_source("stdlib-docstrings"), tokenizer, max_length=LONGEST)
    return [
        (list(map(int, ids)), list(map(int, mask))) for ids, mask in (store[i] for i in range(min(count, len(store))))
    ]


class Clock:
    """Seconds and tokens of the steps after the first; RSS before them, from which the peak is read anew."""

    def __init__(self) -> None:
        import psutil

        self.rss = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")
        self.started, self.tokens, self.losses = 0.0, 0, list[float]()

    def begun(self, number: int) -> None:
        if number == 1:
            self.started, self.tokens = time.perf_counter(), 0

    def made(self, wrapped_by: str) -> dict[str, Any]:
        seconds = time.perf_counter() - self.started
        return {
            "seconds": seconds, "tokens": self.tokens, "losses": self.losses, "rss_before_bytes": self.rss,
            "wrapped_by": wrapped_by,
        }  # fmt: skip


def by_finefit(settings: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    import torch

    from finefit import loop, models
    from finefit.assets import model_folder
    from finefit.build import build
    from finefit.data.micro import shared_out
    from finefit.engines import world as worlds
    from finefit.mesh import Mesh
    from finefit.meshes import techniques_of_mesh
    from finefit.nn.optimizers import Optimizing
    from finefit.run import of_share
    from finefit.techniques import Accumulation, Clipping, FusedLoss, FusedOps, Packing, Precision, in_order

    folder, rows = model_folder(MODEL).folder, examples(EXAMPLES)
    device = worlds.begin("cpu")
    mesh = Mesh(**settings)
    world = worlds.World(mesh, "cpu")
    kind: Any = {"fp32": "fp32", "bf16": "bf16_mixed"}[given.precision]
    techniques = in_order(
        [
            Precision(kind),
            *techniques_of_mesh(mesh),
            FusedOps(),
            Packing(),
            FusedLoss(256),
            Accumulation(MICRO, 0, 2),
            Clipping(MAX_NORM),
        ]
    )
    run = build(models.config_of(folder), techniques, models.fill_from(folder), device, Optimizing(RATE), 0, world)
    clock = Clock()
    torch.manual_seed(0)
    for number in range(1 + given.steps):
        clock.begun(number)
        some = [rows[(number * GLOBAL_BATCH + i) % len(rows)] for i in range(GLOBAL_BATCH)]
        groups = shared_out([len(ids) for ids, _ in some], run.split, world.data_size, world.lockstep)
        mine = [of_share(run, some, group) for group in groups[world.data_rank]]
        loss, *_ = loop.optimizer_step(run, mine, RATE)
        clock.tokens += sum(batch.tokens for batch in mine)
        clock.losses.append(loss)
    made = clock.made(type(run.optimizer.home).__name__)
    worlds.end()
    return made


def padded(rows: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """As the Trainer's collators pad: to the longest, -100 where nothing is learnt."""
    import torch

    longest = max(len(ids) for ids, _ in rows)
    batch = {name: torch.zeros(len(rows), longest, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    labels = torch.full((len(rows), longest), -100)
    for i, (ids, mask) in enumerate(rows):
        n = len(ids)
        batch["input_ids"][i, :n], batch["attention_mask"][i, :n] = torch.tensor(ids), 1
        learnt = torch.tensor(mask, dtype=torch.bool)
        labels[i, :n][learnt] = batch["input_ids"][i, :n][learnt]
    return {**batch, "labels": labels}


def by_trainer(settings: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from finefit.assets import model_folder

    rows, each = examples(EXAMPLES), GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    # Before the arguments: with those of stage 3 transformers would make it in shards, and fails on a CPU.
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder(MODEL).folder, dtype="float32")
    told = dict(settings)
    if stage := told.pop("deepspeed", 0):
        zero = {"stage": stage, "reduce_bucket_size": 2**25, "contiguous_gradients": True, "overlap_comm": False}
        told["deepspeed"] = {
            "zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_allow_untested_optimizer": True,
        }  # fmt: skip
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=MICRO, gradient_accumulation_steps=each // MICRO,
        max_steps=1 + given.steps, learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=MAX_NORM,
        bf16=given.precision == "bf16", use_cpu=True, ddp_backend="gloo", report_to=[], logging_steps=1, save_strategy="no",
        optim="adamw_torch_fused", remove_unused_columns=False, dataloader_num_workers=0, disable_tqdm=True, **told,
    )  # fmt: skip

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.begun(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                clock.losses.append(logs["loss"])

    class Counting(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            clock.tokens += int(inputs["attention_mask"].sum())  # batches are collated ahead of their step
            return super().compute_loss(model, inputs, *args, **more)

    trainer = Counting(model, arguments, data_collator=padded, train_dataset=rows, callbacks=[Watch()])  # type: ignore[arg-type]
    trainer._get_train_sampler = lambda *_: None  # type: ignore[method-assign]  # in the order they are given
    clock = Clock()
    trainer.train()
    return clock.made(type(trainer.model_wrapped).__name__)


def by_fsdp2(settings: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """A unit a block, as accelerate's auto-wrap by transformer layer; reduced in every micro-batch, as by its default."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    from finefit.assets import model_folder

    dist.init_process_group("gloo")
    rows, ranks, rank = examples(EXAMPLES), dist.get_world_size(), dist.get_rank()
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder(MODEL).folder, dtype="float32")
    model.config.use_cache = False
    half = torch.bfloat16 if given.precision == "bf16" else None
    policy = MixedPrecisionPolicy(half, torch.float32 if half else None)
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=settings["reshard"], mp_policy=policy)
    fully_shard(model, reshard_after_forward=settings["reshard"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0, fused=True)
    clock = Clock()
    each = GLOBAL_BATCH // ranks
    for number in range(1 + given.steps):
        clock.begun(number)
        some = [rows[(number * GLOBAL_BATCH + i) % len(rows)] for i in range(GLOBAL_BATCH)]
        mine, told = some[rank::ranks], torch.zeros(())
        labelled = sum(sum(mask[1:]) for _, mask in some)
        for start in range(0, each, MICRO):
            batch = padded(mine[start : start + MICRO])
            clock.tokens += int(batch["attention_mask"].sum())
            loss = model(**batch, num_items_in_batch=labelled).loss
            (loss * ranks).backward()  # gradients are averaged
            told += loss.detach()
        dist.all_reduce(told)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        clock.losses.append(told.item())
    made = clock.made(type(model).__name__)
    dist.destroy_process_group()
    return made


if __name__ == "__main__":
    main()
