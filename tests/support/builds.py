"""Runs `kvseek build` in this process."""

from __future__ import annotations

from pathlib import Path

from kvseek.builder import build


def run_build(model: Path, output_dir: Path, *flags: str) -> int:
    """Build with PyTorch's kernels, method full and no words, unless the flags say otherwise; returns the exit status."""
    arguments = ["--model", str(model), "--output_dir", str(output_dir), "--quiet"]
    arguments += ["--method", "full"] * ("--method" not in flags)
    arguments += ["--kernels", "reference"] * ("--kernels" not in flags and "cuda" not in flags)
    return build.main([*arguments, *flags])
