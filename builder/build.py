"""`kvseek build`: build an engine directory from a checkpoint, plan, inspect, verify or check one (docs/builder.md)."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from kvseek.builder.atomic_directory import atomic_directory, refuse_foreign, remove_leftovers
from kvseek.builder.calibration import ALTERNATIVES, Calibration, Calibrator, Text
from kvseek.builder.capacity import print_fit
from kvseek.builder.checking import check_engine, check_existing, keeps
from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.storage import WeightStorage
from kvseek.builder.checkpoints.tokenizer import ModelTokenizer
from kvseek.builder.checkpoints.weights import NONE_MEASURED, OwnNumbers, WeightFormat, own_numbers
from kvseek.builder.compile.cpu import cached_cpu_library
from kvseek.builder.compile.cuda import cached_cubins, specialise
from kvseek.builder.fingerprint import fingerprint, up_to_date
from kvseek.builder.flags import FlagParser
from kvseek.builder.inspection import print_engine, print_faults
from kvseek.builder.options import ENGINE_FIELDS, BuildOptions, FitOptions, Options, parse
from kvseek.builder.preflight import available_room, needed_room, refuse_too_little
from kvseek.builder.weight_storage import weight_storage
from kvseek.core.command_line import Parser, tells_errors
from kvseek.core.config import EngineConfig, largest_group, write_config
from kvseek.core.cpu_library import LIBRARY_FILE
from kvseek.core.cuda import KERNELS_FOLDER, cubin_path
from kvseek.core.errors import require
from kvseek.core.manifest import CODEBOOKS_FILE, write_manifest
from kvseek.core.ranks import rank_config
from kvseek.core.weight_only import INT4, NONE
from kvseek.engine.cache.memory_layout import host_rows, lay_out_rows
from kvseek.engine.loading.supported import check_supported, needs_cpu_library
from kvseek.engine.tokenizer import TOKENIZER_FOLDER, Tokenizer
from kvseek.plugins.registry import method_traits
from kvseek.plugins.sources import write_sources_digest

CHECKED_BYTES = 1_000_000_000  # of an engine's weights: with less, --check takes seconds and is the default


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Build, plan, inspect, verify or check; returns 0, or 1 after printing an error. Bad usage exits with 2."""
    return _run(parse(argv))


def make_parser() -> Parser:
    """Make the parser of `kvseek build`."""
    return FlagParser()


def _run(options: Options) -> int:
    """Do what the options ask for."""
    if isinstance(options, BuildOptions):
        with _terminable():
            build_engine(options)
        return 0
    console = Console(markup=False, highlight=False)  # names and messages may hold brackets
    if isinstance(options, FitOptions):
        print_fit(options, console)
    elif options.mode == "check":
        return check_existing(options.directory, options.model, console)
    elif options.mode == "verify":
        return print_faults(options.directory, console)
    else:
        print_engine(options.directory, console, options.as_json)
    return 0


@dataclass(frozen=True)
class _Build:
    """One engine to build: the options, and all that follows from them and from the checkpoint.

    Attributes
    ----------
    text : Text or None
        Text to calibrate with.
    own : OwnNumbers or None
        What `own_numbers` finds.
    fingerprint : str
        Digest of everything that the build depends on.
    """

    options: BuildOptions
    checkpoint: Checkpoint
    config: EngineConfig
    storage: WeightStorage
    text: Text | None
    own: OwnNumbers | None
    fingerprint: str

    @classmethod
    def of(cls, options: BuildOptions, checkpoint: Checkpoint) -> _Build:
        """Complete the options; raises as `build_engine`."""
        text = None if options.calibrate is None else Text.read(options.calibrate)
        own = own_numbers(checkpoint, options.choices["device"])
        config = options.engine_config(checkpoint.config, own)
        storage = weight_storage(config)
        sources = [*checkpoint.sources, *filter(None, [options.calibrate])]
        chosen = {"choices": {name: getattr(config, name) for name in ENGINE_FIELDS}}  # whether asked for, or a default
        settings = options.settings | chosen | storage.versions()
        return cls(options, checkpoint, config, storage, text, own, fingerprint(settings, sources))

    @property
    def compares(self) -> bool:
        """Whether the engine's logits are compared with transformers'."""
        asked = self.options.check
        return self.storage.weight_bytes < CHECKED_BYTES if asked is None else asked

    @property
    def notes(self) -> Sequence[str]:
        """What becomes of a quantised checkpoint's numbers, and what of the checkpoint is not used."""
        own = [] if self.own is None else [self.own.describe(self.config, self.checkpoint.quantised_by)]
        return (*own, *self.checkpoint.notes)

    @property
    def alternatives(self) -> dict[str, WeightFormat]:
        """What `--calibrate` compares with: the weights of a checkpoint that is not quantised, rounded."""
        if self.own is not None and (self.own.stated or self.own.precision != NONE):
            return {}
        group, dtype = largest_group(self.config.model.matrix_inputs().values()), getattr(torch, self.config.dtype)
        others = [name for name in ALTERNATIVES if name != self.config.weight_only_precision]
        formats = {name: WeightFormat(dtype, name, weight_group=group) for name in others}
        return {name: one for name, one in formats.items() if group or name != INT4}

    def check(self, output_dir: Path) -> None:
        """Raise ConfigError unless the kernels support the model, its tensors are there, and disk and memory suffice.

        Also if the checkpoint contradicts itself, or transformers would compute something else from its files; CapacityError
        if a stated bound of the rows' memory has no room for any.
        """
        own = rank_config(self.config)
        if own.device == "cuda":
            specialise(own)
        check_supported(own)
        lay_out = host_rows if own.device == "cpu" else partial(lay_out_rows, device_row_bytes=None)
        lay_out(own, getattr(torch, own.dtype))  # bounds that no row fits into
        needed = needed_room(self.checkpoint, self.config, len(self.options.cuda_archs))
        refuse_too_little(needed, available_room(output_dir), self.options.output_dir, self.options.model)
        self.checkpoint.check()


def build_engine(options: BuildOptions) -> bool:
    """Build `options.output_dir`, unless it holds an intact engine of these options already.

    Returns
    -------
    bool
        Whether the engine was built now.

    Raises
    ------
    ConfigError
        If the model is unsupported or damaged, an option is out of range, the text to calibrate with cannot be read, the
        directory holds something that is no engine, or disk or memory do not suffice. Then nothing has been written.
    CapacityError
        If a stated bound of the rows' memory has no room for any. Nothing has been written.
    KernelError
        If the kernels cannot be compiled, or TensorRT cannot be imported or cannot build a plan.
    CheckError
        If the engine's logits are not transformers', or transformers cannot run the checkpoint. The engine is not kept.
    """
    console = Console(stderr=True, quiet=options.quiet, markup=False)  # names may hold brackets
    checkpoint = open_checkpoint(options.model, options.tokenizer, text_only=options.text_only, mtp=options.mtp)
    output_dir = options.output_dir.resolve()
    refuse_foreign(output_dir)
    remove_leftovers(output_dir)
    build = _Build.of(options, checkpoint)
    if not options.force and up_to_date(output_dir, build.fingerprint):
        console.print(f"{options.output_dir} is up to date; --force builds it again")
        if options.check:
            _check_logits(build, output_dir, console)
        return False
    with console.status("check the model"):
        build.check(output_dir)
    for note in build.notes:
        console.print(note)
    with atomic_directory(output_dir) as directory:
        calibration = _write_engine(build, directory, console)
        if build.compares:  # before the engine takes its place: one that is wrong is not kept
            _check_logits(build, directory, console)
    if calibration is not None:
        calibration.print(console)
    size = sum(path.stat().st_size for path in output_dir.rglob("*") if path.is_file())
    console.print(f"{options.output_dir}: {options.method} engine of {options.model.name}, {size / 1e6:,.0f} MB")
    return True


def engine_fingerprint(options: BuildOptions) -> str:
    """Return the fingerprint of an engine built with these options now; raises as `build_engine` does before it writes."""
    return _Build.of(
        options, open_checkpoint(options.model, options.tokenizer, text_only=options.text_only, mtp=options.mtp)
    ).fingerprint


def _check_logits(build: _Build, directory: Path, console: Console) -> None:
    """Compare with transformers, which is imported only for that; raises CheckError if the logits are others."""
    with console.status("compare with transformers"):
        found = check_engine(directory, build.checkpoint, keeps(build.config, build.own))
    console.print(found.text, soft_wrap=True)


def _write_engine(build: _Build, directory: Path, console: Console) -> Calibration | None:
    """Write all files of the engine, the manifest last; returns the calibration, if one was asked for."""
    options, config, checkpoint = build.options, build.config, build.checkpoint
    columns = (TextColumn("{task.description:<20}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=options.quiet) as progress:
        with _step(progress, "save the tokenizer"):
            _write_tokenizer(directory, checkpoint)
        config = _with_end_of(checkpoint.tokenizer(), config, progress.console)
        write_config(config, directory)
        calibrator = None
        if build.text is not None:
            with _step(progress, "read the text"):
                calibrator = _calibrator(build, build.text, config, directory, progress)
        with _step(progress, "compute codebooks"):
            write_codebooks(directory, config)
        if config.kernels == "native":
            with _step(progress, "compile kernels", len(options.cuda_archs) or 1) as advance:
                write_kernels(directory, config, options.cuda_archs, advance)
        importance: Mapping[str, Tensor] = NONE_MEASURED
        if calibrator is not None and calibrator.measures:
            task = f"measure on {calibrator.device.type}"
            with _step(progress, task, calibrator.measuring_units) as advance:
                calibrator.measure(checkpoint, advance)
            importance = calibrator.importance
        with _step(progress, build.storage.task, build.storage.steps) as advance:
            build.storage.write(checkpoint, directory, advance, importance)
        calibration = None
        if calibrator is not None:
            with _step(progress, f"calibrate on {calibrator.device.type}", calibrator.units) as advance:
                calibration = calibrator.run(checkpoint, directory, advance)
            calibration.save(directory)
        with _step(progress, "hash files"):
            write_manifest(directory, options.model.resolve().name, build.fingerprint)
    return calibration


def _calibrator(build: _Build, text: Text, config: EngineConfig, directory: Path, progress: Progress) -> Calibrator:
    """Check the text before weights are written; prints a note if it has fewer tokens than were asked for."""
    options, tokenizer = build.options, Tokenizer(directory)
    tokens, window = options.calibrate_tokens, options.calibrate_window
    calibrator = Calibrator(text, config, tokenizer, tokens, window, build.alternatives)
    if calibrator.tokens < options.calibrate_tokens:
        short = f"fewer than calibrate_tokens = {options.calibrate_tokens:,}: all are used"
        progress.console.print(f"{text.name} has {calibrator.tokens:,} tokens, {short}")
    return calibrator


def write_kernels(
    directory: Path, config: EngineConfig, cuda_archs: Sequence[int], progress: Callable[[int], None]
) -> None:
    """Write the CPU library, or a cubin per architecture, or both; each is compiled once per source text and then cached."""
    (directory / KERNELS_FOLDER).mkdir()
    write_sources_digest(directory)
    if needs_cpu_library(config):
        shutil.copyfile(cached_cpu_library(), directory / LIBRARY_FILE)
    if config.device == "cpu":
        return
    for arch, image in cached_cubins(specialise(rank_config(config)), cuda_archs, progress).items():
        cubin_path(directory, arch).write_bytes(image)


def _write_tokenizer(directory: Path, checkpoint: Checkpoint) -> None:
    """Save the tokenizer; raises ConfigError if it has ids for which the model has no embedding."""
    tokenizer, vocab_size = checkpoint.tokenizer(), checkpoint.config.vocab_size
    last = max(tokenizer.backend.get_vocab().values(), default=0)
    limit, remedy = f"< vocab_size = {vocab_size} of the model", "name the directory of this model's tokenizer"
    name = f"largest id of the tokenizer of {checkpoint.tokenizer_directory or checkpoint.path}"
    require(last < vocab_size, name, last, limit, f"{remedy} with --tokenizer, or remove added tokens from its files")
    tokenizer.save(directory / TOKENIZER_FOLDER)


def _with_end_of(tokenizer: ModelTokenizer, config: EngineConfig, console: Console) -> EngineConfig:
    """Add the tokenizer's eos_token to the end tokens that the model's configurations state, as other servers do.

    Fine-tunes with a chat template of their own often state its end in the tokenizer alone.
    """
    end, ends = tokenizer.special_id("eos_token"), config.model.eos_token_ids
    if end is None or end in ends:
        return config
    token = tokenizer.special_tokens["eos_token"]
    console.print(
        f"end tokens: {list(ends)} of the model's configurations, and {end} ({token}), the tokenizer's eos_token"
    )
    return replace(config, model=replace(config.model, eos_token_ids=(*ends, end)))


def write_codebooks(directory: Path, config: EngineConfig) -> None:
    from safetensors.torch import save

    codebooks = method_traits(config).codebooks(config.model.head_dim)
    if codebooks:
        data = save({name: tensor.contiguous() for name, tensor in codebooks.items()})
        (directory / CODEBOOKS_FILE).write_bytes(data)  # save_file would make the file readable only by its owner


@contextlib.contextmanager
def _step(progress: Progress, description: str, total: int = 1) -> Iterator[Callable[[int], None]]:
    """Show a line of the progress bar, which the body may advance; it is full at the end."""
    task = progress.add_task(description, total=total)
    yield lambda amount: progress.advance(task, amount)
    progress.update(task, completed=total)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that a build that is told to stop removes what it wrote."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    # Python searches the folder of a script first, where builder/tensorrt/ would be found instead of TensorRT's own module.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    sys.exit(main())
