"""`genomoe doctor`: what this machine can run, which backends are picked, and why not the others."""

import json
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from genomoe.ops.attention import select_attention
from genomoe.ops.grouped_mlp import select_backend
from genomoe.training.run_directory import environment

OPTIONAL = {
    "matplotlib": "plots: pip install 'genomoe[plot]'",
    "tensorboard": "logger=tensorboard: pip install 'genomoe[tensorboard]'",
    "wandb": "logger=wandb: pip install 'genomoe[wandb]'",
    "torchao": "optim.moments=int8: pip install 'genomoe[int8]'",
    "transformers": "Hugging Face checks: pip install 'genomoe[hf]'",
    "peft": "LoRA fine-tuning: pip install 'genomoe[lora]'",
    "triton": "fused kernels on NVIDIA GPUs",
    "flash-attn-4": "the fastest attention on Hopper: pip install 'genomoe[flash4]'",
    "quack-kernels": "the fastest bfloat16 experts on Hopper, and fp8 scoring: pip install 'genomoe[quack]'",
    "transformer_engine": "Transformer Engine backends: pip install 'genomoe[te]'",
}


def run(*, as_json: bool) -> None:
    """Print the findings as tables or JSON."""
    findings = examine()
    if as_json:
        print(json.dumps(findings, indent=2))
        return
    console = Console()
    hardware = findings["environment"]["hardware"]
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in hardware["gpus"]) or "none that torch sees"
    console.print(f"CPU: {hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB; GPUs: {gpus}")
    packages = findings["environment"]["packages"]
    console.print("Packages: " + ", ".join(f"{name} {version}" for name, version in packages.items()))
    for title, rows in (
        ("Backends", _picks(findings["backends"])),
        ("Not taken", _not_taken(findings["backends"])),
        ("Optional packages", findings["optional"]),
    ):
        table = Table(title=title)
        for column in rows[0]:
            table.add_column(column)
        for row in rows:
            table.add_row(*(escape(value) for value in row.values()))
        console.print(table)


def examine() -> dict[str, Any]:
    """Environment, every pick of a backend with its reason and why the others were not, and the optional packages."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "environment": environment(),
        "device": str(device),
        "backends": [*_expert_backends(device), *_attention_backends(device)],
        "optional": [_optional(name, use) for name, use in OPTIONAL.items()],
    }


def _expert_backends(device: torch.device) -> list[dict[str, Any]]:
    """What `experts=auto` picks for each precision and way of saving, for weights of Genos-1.2B's shape."""
    rows = []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x_TD = torch.empty(256, 1024, dtype=dtype, device=device)
    w_up_E2ID = torch.empty(1, 8192, 1024, dtype=dtype, device=device).expand(8, -1, -1)
    for precision in ("bf16", "fp8", "mxfp8"):
        for save in ("bf16", "mxfp8", "recompute"):
            try:
                choice = select_backend(x_TD, w_up_E2ID, precision=precision, save=save)
                picked, reason, others = choice
            except ValueError as error:
                picked, reason, others = "none", str(error), {}
            rows.append(
                {
                    "part": "experts",
                    "for": f"{precision}, save {save}",
                    "picked": picked,
                    "why": reason,
                    "others": others,
                }
            )
    return rows


def _attention_backends(device: torch.device) -> list[dict[str, Any]]:
    rows = []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for packed in (False, True):
        for window in (False, True):
            choice = select_attention(device, dtype, packed=packed, window=window)
            what = ("packed" if packed else "fixed windows") + (", sliding window" if window else "")
            rows.append(
                {
                    "part": "attention",
                    "for": what,
                    "picked": choice.name,
                    "why": choice.reason,
                    "others": choice.others,
                }
            )
    return rows


def _picks(backends: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Each pick with every use that has it, a line each."""
    uses: dict[tuple[str, str, str], list[str]] = {}
    for row in backends:
        uses.setdefault((row["part"], row["picked"], row["why"]), []).append(row["for"])
    return [
        {"part": part, "for": "\n".join(several), "picked": picked, "why": why}
        for (part, picked, why), several in uses.items()
    ]


def _not_taken(backends: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Each backend that was not picked somewhere, with every reason once."""
    reasons = {(row["part"], name, why): None for row in backends for name, why in row["others"].items()}
    return [{"part": part, "backend": name, "why not": why} for part, name, why in sorted(reasons)]


def _optional(name: str, use: str) -> dict[str, str]:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = "not installed"
    return {"package": name, "version": version, "brings": use}
