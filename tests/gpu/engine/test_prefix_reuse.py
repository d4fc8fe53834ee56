"""Prefix reuse of engines on the GPU: what the tests of the CPU check (tests/engine), and that the host never waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine import test_cached_prefill as sparse_checks
from tests.engine import test_prefix_reuse as checks
from tests.engine.cache.test_isolation import POISONS
from tests.engine.test_prefix_disk import check_restarts
from tests.engine.test_prefix_reuse import LIMITS
from tests.engine.test_reuse_operations import ROOM, check_operations
from tests.gpu.engine.test_isolation import left_behind
from tests.gpu.plugins.test_methods import CONTESTANTS
from tests.gpu.waits import no_host_waits, slow_stream
from tests.plugins.cases import CASES, method_flags
from tests.plugins.prkv.settings import UPDATES
from tests.support.long_prompts import DOCUMENT, HEADS, SHAPE, Load, known_answers, load_changed

from kvseek.core.errors import ConfigError
from kvseek.core.request import Request
from kvseek.engine.cache import cache as cache_module
from kvseek.engine.cache.prefixes.tree import pack_tokens
from kvseek.engine.engine import Engine
from kvseek.engine.loading.prefixes import DiskSettings
from kvseek.plugins.prkv import update as prkv_update
from kvseek.plugins.registry import get_method

pytestmark = pytest.mark.gpu

SPARSE = {"full": ("full", ()), **CONTESTANTS}  # by name: a method, and flags with which it selects few rows
ENTRIES = [name for name in SPARSE if get_method(SPARSE[name][0]).traits().prefix_reuse == "entries"]
SELECTING = [name for name in ENTRIES if name != "full"]
UPDATING = ["prkv", "prkv_codes"]
OFFLOADS = ("always", "never")
SIDE_CYCLES = 4_000_000  # about 2 ms: side streams fall behind the current one
LoadGpu = Callable[..., Engine]
EVICTIONS = ("--cache.update", "64")  # codes on a GPU need whole blocks of so many keys
WINDOW = (*checks.WINDOW, *EVICTIONS)


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    return random_model("llama", **SHAPE, **HEADS, head_dim=64)


@pytest.fixture(scope="module")
def load_gpu(model: Path, on_gpu: BuildEngine) -> LoadGpu:
    """Load an engine of the GPU whose method attends to everything, or, with `sparse`, to few rows.

    Fields of its cache may be changed; bytes of the pool are given for heads half as large (tests/engine).
    """

    def make(offload: str, name: str = "full", *flags: str, sparse: bool = False, **cache: object) -> Engine:
        method, few = SPARSE[name]
        window, limits = ((*sparse_checks.FLAGS, *EVICTIONS), sparse_checks.LIMITS) if sparse else (WINDOW, LIMITS)
        everything = () if sparse else method_flags(method, CASES[method].everything)
        directory = on_gpu(model, method, *window, *limits, *few, *everything, "--dtype", "float32", *flags)
        if (most := cache.pop("kv_cache_host_memory_bytes", None)) is not None:
            assert isinstance(most, int)
            cache[f"kv_cache_{'device' if offload == 'never' else 'host'}_memory_bytes"] = 2 * most
        engine = load_changed(directory, {"offload": offload, **cache})
        assert engine._prefixes.enabled == (engine.config.cache.reuse is not False)
        return engine

    return make


def of(names: Sequence[str], *both: str) -> pytest.MarkDecorator:
    """Run a test for these names with rows in host memory, and for those of `both` with rows on the device, too.

    Tests of a name and a place share what is built once, so a worker of `pytest --dist loadgroup` takes them all.
    """
    cases = [(name, offload) for name in names for offload in OFFLOADS if offload == "always" or name in both]
    return pytest.mark.parametrize(
        ("name", "load"),
        [pytest.param(*case, marks=pytest.mark.xdist_group("-".join(case))) for case in cases],
        indirect=["load"],
    )


@pytest.fixture
def load(request: pytest.FixtureRequest, load_gpu: LoadGpu) -> Load:
    return partial(load_gpu, request.param)


@pytest.fixture(scope="module")
def plain(load_gpu: LoadGpu) -> checks.Plain:
    """What an engine answers that reads every prompt, and has only one request."""
    return known_answers(load_gpu("always", reuse=False))


@of(list(SPARSE), *ENTRIES, "prkv", "prkv_codes")
def test_a_prompt_that_begins_alike_has_the_same_answer(name: str, load: Load, plain: checks.Plain) -> None:
    checks.check_prompts_that_begin_alike(load(name), plain)


@of(["full", "nested", "pariskv", "clusterkv", "ctkvr-cpu", "prkv", "prkv_codes"], "prkv_codes")
def test_a_conversation_goes_on(name: str, load: Load, plain: checks.Plain) -> None:
    checks.test_a_conversation_goes_on(name, load, plain)


@of(["full", "nested", "pariskv", "clusterkv", "ctkvr-cpu", "prkv", "prkv_codes"], "full", "pariskv", "prkv_codes")
def test_random_operations(name: str, load: Load, plain: checks.Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies on side streams come late, so that whoever does not wait for them shows."""
    for module in (cache_module, prkv_update):
        monkeypatch.setattr(module, "SideStream", slow_stream(SIDE_CYCLES))
    engine = load(name, kv_cache_host_memory_bytes=ROOM * checks.EXTENT_BYTES)
    check_operations(lambda folder: engine, plain, restarts=False, examples=2)


@of(UPDATING, *UPDATING)
def test_a_reused_prefix_has_the_static_set_of_a_fresh_prompt(name: str, load: Load) -> None:
    checks.check_few_rows(*(load(name, *UPDATES, sparse=True, reuse=reuse) for reuse in (None, False)), tokens=30)


@of(["full", "pariskv", "prkv", "prkv_codes"])
def test_a_cancelled_request_keeps_what_all_layers_have_read(name: str, load: Load, plain: checks.Plain) -> None:
    checks.test_a_cancelled_request_keeps_what_all_layers_have_read(name, load, plain)


@of(SELECTING, "pariskv")
def test_requests_that_share_extents_select_as_alone(name: str, load: Load) -> None:
    """Four questions about one document decode together, and keep hot rows of the same rows of the pool."""
    engine = load(name, sparse=True)
    checks.ask(engine, Request(DOCUMENT, 1))
    requests = [Request(DOCUMENT + (number,) * 9, 30) for number in range(3, 7)]

    def hits() -> torch.Tensor:
        """Rows that were found among the hot rows, and that were not."""
        return sum((hot.hits.sum(dim=(0, 1)) for hot in engine.decoder.retrieval.hot_rows), torch.zeros(2).cuda()).cpu()

    start = hits()
    alone, first = [checks.ask(engine, request)[0][0] for request in requests], hits()
    together, second = checks.ask(engine, *requests), hits()
    (found, read), (found_together, read_together) = first - start, second - first
    assert found_together + read_together == found + read
    assert found_together >= 0.95 * found
    assert all(statistics.shared_extents == 2 for _, statistics in together)
    assert [tokens for tokens, _ in together] == alone, "so few tokens do not show how products round"


@of(SELECTING, *SELECTING)
def test_the_rest_of_a_prompt_is_read_as_by_decode_steps(name: str, load: Load) -> None:
    sparse = partial(load, sparse=True, cached_prefill="sparse")
    sparse_checks.test_the_rest_of_a_prompt_is_read_as_by_decode_steps(name, "native", sparse)


@of(["nested", "pariskv", "clusterkv", "ctkvr-cpu", "prkv", "prkv_codes"], "pariskv", "prkv_codes")
def test_what_is_free_tells_nothing(name: str, load: Load, plain: checks.Plain) -> None:
    checks.check_what_is_free(load(name), plain, left_behind_now, POISONS)


def left_behind_now(engine: Engine) -> Iterable[torch.Tensor]:
    """See left_behind. Rows that change places are read when their request has ended, and the host writes next."""
    torch.cuda.synchronize()
    return left_behind(engine)


@of(["full", "nested", "prkv_codes"])
def test_a_prompt_is_not_read_again_after_a_restart(
    name: str, load: Load, model: Path, on_gpu: BuildEngine, plain: checks.Plain, tmp_path: Path
) -> None:
    method, few = SPARSE[name]
    flags = (*WINDOW, *LIMITS, *few, *method_flags(method, CASES[method].everything), "--dtype", "float32")
    directory = on_gpu(model, method, *flags, "--cache.offload", "always")
    check_restarts(lambda: Engine.load(directory, disk=DiskSettings(tmp_path)), plain)


def test_rows_on_the_device_are_not_written_to_disk(model: Path, on_gpu: BuildEngine, tmp_path: Path) -> None:
    directory = on_gpu(model, "full", *WINDOW, *LIMITS, "--cache.offload", "never")
    with pytest.raises(ConfigError, match=r"disk_dir = .*: must be left out with the rows of 2 layers on the device"):
        Engine.load(directory, disk=DiskSettings(tmp_path))


@of(["pariskv", "prkv_codes"], "pariskv", "prkv_codes")
def test_the_host_waits_for_nothing_but_tokens(name: str, load: Load) -> None:
    engine = load(name)
    for _ in range(2):  # the first time pinned memory is allocated
        checks.ask(engine, Request(DOCUMENT, 3), Request(DOCUMENT + (5,) * 40, 3))
    cache, decoder, prompt = engine._cache, engine.decoder, DOCUMENT + (7,) * 200
    packed = pack_tokens(prompt)
    with no_host_waits():
        prefix = engine._prefixes.find(packed, None)
        assert prefix is not None
        engine._prefixes.open(0, len(prompt) + 10, prefix)
        prefill = decoder.prefill([(0, prompt)])
        while prefill.progress < 1:
            prefill.advance(512)
    prefill.finish()
    with no_host_waits():
        engine._prefixes.share(0, packed, None)
        engine._prefixes.close(0, packed)
    torch.cuda.synchronize()
    assert cache.extents.used == 0
