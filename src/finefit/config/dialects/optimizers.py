"""Names of optimizers in other tools' files -> what they keep.

transformers' ``OptimizerNames`` and how its trainer builds them (``trainer_optimizer.py``, 5.24), Axolotl's own names
(``utils/schemas/enums.py`` CustomSupportedOptimizers), and classes torchtune's ``_component_`` names. torch's own keep
their moments in the parameter's type and step many tensors at once unless fused; bitsandbytes and torchao step one
tensor at a time.
"""

import re
from dataclasses import dataclass
from typing import Any

from ...foreign import Dtype
from .sheet import Sheet


@dataclass(frozen=True, slots=True)
class Optimizer:
    """``bits`` of 0: the moments have the parameter's own type."""

    name: str
    bits: int = 0
    foreach: bool = False
    paged: bool = False
    rank: int = 0
    """Of the space that gradients of whole weights are projected into; 0: none."""
    in_backward: bool = False

    def ours(self) -> str | None:
        """Our ``train.optimizer`` that is the same, None where none is. What is paged there is held here."""
        return _OURS.get((self.name, self.bits if self.bits in (4, 8) else 0))

    def bits_with(self, trained: Dtype) -> int:
        return self.bits or (32 if trained == "float32" else 16)


_OURS = {
    ("adamw", 0): "adamw", ("adamw", 8): "adamw_8bit", ("adamw", 4): "adamw_4bit", ("adam", 0): "adamw",
    ("lion", 0): "lion", ("lion", 8): "lion_8bit", ("adafactor", 0): "adafactor", ("sgd", 0): "sgd",
}  # fmt: skip
# Words that stand for AdamW only as far as what is kept goes.
_ALIKE = ("schedule_free_adamw", "adopt_adamw", "ao_adamw_fp8", "torchao.optim.AdamWFp8")


def _bnb(name: str, bits: int) -> dict[bool, Optimizer]:
    return {paged: Optimizer(name, bits, paged=paged) for paged in (False, True)}


_ADAM8, _ADAM32, _LION8, _LION32 = _bnb("adamw", 8), _bnb("adamw", 32), _bnb("lion", 8), _bnb("lion", 32)

HF: dict[str, Optimizer] = {
    "adamw_torch": Optimizer("adamw", foreach=True),
    "adamw_hf": Optimizer("adamw"),
    "adamw_torch_fused": Optimizer("adamw"),
    "adamw_torch_npu_fused": Optimizer("adamw"),
    "adamw_torch_8bit": Optimizer("adamw", 8),
    "adamw_torch_4bit": Optimizer("adamw", 4),
    "adamw_bnb_8bit": _ADAM8[False],
    "adamw_8bit": _ADAM8[False],
    "paged_adamw_8bit": _ADAM8[True],
    "paged_adamw_32bit": _ADAM32[True],
    "paged_adamw": _ADAM32[True],
    "lion_32bit": _LION32[False],
    "lion_8bit": _LION8[False],
    "paged_lion_32bit": _LION32[True],
    "paged_lion_8bit": _LION8[True],
    "adafactor": Optimizer("adafactor", 32),
    "sgd": Optimizer("sgd", foreach=True),
    "adagrad": Optimizer("adagrad", foreach=True),
    "rmsprop": Optimizer("rmsprop", foreach=True),
    "rmsprop_bnb": Optimizer("rmsprop", 32),
    "rmsprop_bnb_8bit": Optimizer("rmsprop", 8),
    "rmsprop_bnb_32bit": Optimizer("rmsprop", 32),
    "schedule_free_adamw": Optimizer("adamw", foreach=True),  # an average and a second moment: as much as AdamW
}
AXOLOTL: dict[str, Optimizer] = {
    **HF,
    "ao_adamw_4bit": Optimizer("adamw", 4),
    "ao_adamw_8bit": Optimizer("adamw", 8),
    "ao_adamw_fp8": Optimizer("adamw", 8),
    "adopt_adamw": Optimizer("adamw", foreach=True),
    "muon": Optimizer("muon", foreach=True),
}
_LOW_RANK = "projects gradients to a low rank, which a simulated step cannot express"
_REASONS: dict[str, str] = {
    "galore_adafactor": _LOW_RANK, "apollo": _LOW_RANK, "q_galore": _LOW_RANK,
    "lomo": "steps inside a backward pass of its own", "adalomo": "steps inside a backward pass of its own",
    "ademamix": "keeps three moments", "paged_ademamix": "keeps three moments", "dion": "keeps low-rank moments",
}  # fmt: skip
_GALORE = {"galore_adamw": 0, "galore_adamw_8bit": 8}  # bits of the moments; 0: the gradient's type
_GALORE_RANK = 128  # trainer_optimizer.py
CLASSES: dict[str, Optimizer] = {
    "torch.optim.AdamW": Optimizer("adamw", foreach=True),
    "torch.optim.Adam": Optimizer("adam", foreach=True),
    "torch.optim.SGD": Optimizer("sgd", foreach=True),
    "torch.optim.Adafactor": Optimizer("adafactor", 32),
    "bitsandbytes.optim.AdamW": _ADAM32[False],
    "bitsandbytes.optim.AdamW8bit": _ADAM8[False],
    "bitsandbytes.optim.PagedAdamW": _ADAM32[True],
    "bitsandbytes.optim.PagedAdamW32bit": _ADAM32[True],
    "bitsandbytes.optim.PagedAdamW8bit": _ADAM8[True],
    "bitsandbytes.optim.Lion8bit": _LION8[False],
    "torchao.optim.AdamW8bit": Optimizer("adamw", 8),
    "torchao.optim.AdamW4bit": Optimizer("adamw", 4),
    "torchao.optim.AdamWFp8": Optimizer("adamw", 8),
}


def named(sheet: Sheet, key: str, default: str, known: dict[str, Optimizer] = HF) -> Optimizer:
    """The optimizer a word stands for; refused, and AdamW instead, where a simulated step has nothing like it."""
    word = sheet.text(key, default)
    found = known.get(word) or known.get(word.replace("torchao.prototype.low_bit_optim.", "torchao.optim."))
    if found:
        wished = None if word.endswith(_ALIKE) else found.ours()
        if wished is None:
            sheet.loses(key)
        elif wished != "adamw":
            sheet.wants("train.optimizer", wished)
        return found
    kind = word.removesuffix("_layerwise")
    if kind in _GALORE and known is not CLASSES:
        return galore(sheet, key, _GALORE[kind], _rank_of(sheet), word != kind)
    family = next((name for name in sorted(_REASONS, key=len, reverse=True) if word.startswith(name)), "")
    sheet.refuse(key, f"the optimizer {word} {_REASONS.get(family, 'is not one that can be simulated')}")
    return HF["adamw_torch"]


def galore(sheet: Sheet, key: str, bits: int, rank: int, layerwise: bool) -> Optimizer:
    """AdamW in a low-rank space of the gradients; of each tensor inside backward where it is ``layerwise``."""
    sheet.loses(key)
    sheet.wish.pop("train.optimizer", None)
    sheet.note(f"GaLore projects the linear layers of attention and MLP to rank {rank}")
    sheet.get("optim_target_modules")
    return Optimizer("galore_adamw", bits, rank=rank, in_backward=layerwise)


def _rank_of(sheet: Sheet) -> int:
    """Of ``optim_args``, which is text (``rank=64, scale=0.10``) or, in Axolotl, a mapping."""
    arguments = sheet.get("optim_args")
    if isinstance(arguments, dict):
        return sheet.size("rank", "optim_args.rank", _GALORE_RANK)
    found = re.search(r"\brank\s*=\s*(\d{1,9})", str(arguments or ""))
    return int(found[1]) if found else _GALORE_RANK


def of_whole(sheet: Sheet, key: str, optimizer: Optimizer, method: str) -> dict[str, Any]:
    """What such an optimizer adds to a run that trains whole weights; adapters' gradients are not projected."""
    if not optimizer.rank:
        return {}
    if method != "full":
        sheet.refuse(
            key, "a low-rank space of adapters' gradients is not expressed", hint="train whole weights with it"
        )
    return {"rank": optimizer.rank, "step_in_backward": optimizer.in_backward}
