"""After any number of passes the cache holds what a fresh prefill of the same ids would hold, and nothing grows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import cache_values

from treepass.cache import BLOCK_ROWS, TreeCache
from treepass.engine import Engine, Session
from treepass.sampling import Sampler, SamplingParams
from treepass.target import HFTarget, prefill
from treepass.testing import FunctionDrafter, WatchedTarget, random_tree, tiny_llama
from treepass.tree import DraftTree

arch = pytest.mark.arch
unit = pytest.mark.unit
VOCAB = 64


def mixed_drafter(model, prompt: list[int], tokens: int, seed: int) -> FunctionDrafter:
    """Random trees, most of which hold some of the true continuation: from none of it to all of it."""
    truth = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, use_cache=True)[0].tolist()
    rng = np.random.default_rng(seed)

    def tree_of(session, plan, depth) -> DraftTree:
        root, written = session.ids[-1], len(session.ids)
        true = int(rng.integers(min(depth, 4) + 1))
        noise = random_tree(rng, root, nodes=int(rng.integers(8)), max_depth=min(depth, 4), vocab_size=VOCAB)
        tree = DraftTree.merge([noise, DraftTree.chain([root, *truth[written : written + true]])])
        order = np.argsort(tree.depths * 10 + rng.random(tree.rows), kind="stable")
        return tree.reorder(order)

    return FunctionDrafter(tree_of)


def new_session(target, prompt: list[int], room: int) -> Session:
    return Session(list(prompt), room, frozenset(), Sampler(SamplingParams()), target.new_cache())


def check_rows_equal_a_fresh_prefill(session: Session, model) -> None:
    expected = cache_values(model, session.ids[:-1])
    assert session.cache.length == len(session.ids) - 1
    for layer, (keys, values) in enumerate(expected):
        got_keys, got_values = session.cache.rows(layer)
        for got, want in ((got_keys, keys), (got_values, values)):
            assert got.shape == want.shape
            error = float((got - want).abs().max())
            assert error < 1e-10, f"layer {layer}: {error}"


def run_passes(passes: int, every: int, **options) -> tuple[Session, list]:
    model = tiny_llama(1, max_position_embeddings=2048, **options)
    prompt = [3, 1, 4, 1, 5]
    target = WatchedTarget(HFTarget(model))
    engine = Engine(target, mixed_drafter(model, prompt, 5 * passes + 5, 7), nodes=16)
    session = new_session(target, prompt, 5 * passes)
    engine.admit(session)
    records = []
    for number in range(passes):
        records += engine.step([session])
        if (number + 1) % every == 0:
            check_rows_equal_a_fresh_prefill(session, model)
    return session, records


@arch
@pytest.mark.parametrize("options", [{}, {"kv_heads": 4, "layers": 3}, {"tie": True}], ids=str)
def test_rows_equal_a_fresh_prefill_after_100_passes(options):
    _, records = run_passes(100, 10, **options)
    # The test means something only if paths of every length were kept, and rows had to move.
    assert {len(record.path) for record in records} >= {0, 1, 2, 3, 4}
    assert sum(record.path != tuple(range(1, len(record.path) + 1)) for record in records) > 20


def rows_do_not_move(monkeypatch):
    monkeypatch.setattr(TreeCache, "_move", lambda self, start, sources: None)


def last_layer_does_not_move(monkeypatch):
    move = TreeCache._move

    def wrong(self, start, sources):
        kept = self._keys[-1].clone()
        move(self, start, sources)
        self._keys[-1] = kept

    monkeypatch.setattr(TreeCache, "_move", wrong)


def rows_move_in_a_wrong_order(monkeypatch):
    move = TreeCache._move
    monkeypatch.setattr(TreeCache, "_move", lambda self, start, sources: move(self, start, sources[::-1]))


@arch
@pytest.mark.parametrize(
    "mutate", [rows_do_not_move, last_layer_does_not_move, rows_move_in_a_wrong_order], ids=lambda m: m.__name__
)
def test_a_wrong_commit_is_caught(monkeypatch, mutate):
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="layer"):
        run_passes(30, 1)


@arch
def test_300_rounds_leave_equal_layers_and_no_more_buffers():
    model = tiny_llama(1, max_position_embeddings=2048)
    prompt = [3, 1, 4, 1, 5]
    target = HFTarget(model)
    engine = Engine(target, mixed_drafter(model, prompt, 1000, 3), nodes=8)
    session = new_session(target, prompt, 1500)
    engine.admit(session)
    tensors = []
    for _ in range(300):
        engine.step([session])
        cache = session.cache
        assert cache.length == len(session.ids) - 1
        shapes = {tuple(t.shape) for t in (*cache._keys, *cache._values)}
        assert len(shapes) == 1, "layers differ in size"
        assert {tuple(t.shape) for layer in range(cache.num_layers) for t in cache.rows(layer)} == {
            (2, cache.length, 8)
        }
        tensors.append(sum(isinstance(t, torch.Tensor) for t in (*cache._keys, *cache._values)))
    assert set(tensors) == {2 * model.config.num_hidden_layers}
    assert session.cache.length > 400
    # Twice what is needed at most, however long the text was when it grew.
    capacity = session.cache._keys[0].shape[1]
    assert capacity <= 2 * session.cache.length + BLOCK_ROWS
    check_rows_equal_a_fresh_prefill(session, model)


@arch
def test_accepted_rows_are_never_computed_again():
    model = tiny_llama(1, max_position_embeddings=2048)
    prompt = [3, 1, 4, 1, 5]
    target = WatchedTarget(HFTarget(model))
    engine = Engine(target, mixed_drafter(model, prompt, 400, 5), nodes=16)
    session = new_session(target, prompt, 200)
    engine.admit(session)
    assert sum(forest.rows for forest in target.forests) == len(prompt) - 1
    first_pass = len(target.forests)
    records = []
    while session.finish_reason is None:
        records += engine.step([session])
    forests = target.forests[first_pass:]
    assert len(forests) == len(records)
    next_position = len(prompt) - 1
    for forest, record in zip(forests, records, strict=True):
        # Every pass begins at the first position whose row is not committed: all emitted tokens but the last one are.
        assert forest.context_lengths == (next_position,)
        assert forest.positions.min() == next_position
        next_position += len(record.emitted)
    assert sum(record.path != () for record in records) > 20
    assert sum(forest.rows for forest in target.forests) == session.report.rows
    assert session.report.rows == session.report.prompt_rows + sum(1 + record.nodes for record in records)


@arch
@pytest.mark.parametrize("place", range(2, 14))
def test_rows_end_where_a_text_ends_within_a_path(place):
    model = tiny_llama(1)
    prompt = [3, 1, 4]
    text = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()

    def tree_of(session, plan, depth):
        done = len(session.ids) - len(prompt)
        return DraftTree.chain([session.ids[-1], *text[done : done + min(depth, 5)]])

    engine = Engine(HFTarget(model), FunctionDrafter(tree_of), nodes=8)
    session = Session(list(prompt), 20, frozenset([text[place]]), Sampler(SamplingParams()), engine.target.new_cache())
    engine.admit(session)
    while session.finish_reason is None:
        engine.step([session])
    assert session.ids == prompt + text[: text.index(text[place]) + 1]
    check_rows_equal_a_fresh_prefill(session, model)


@arch
def test_drafts_stop_at_the_models_maximum_whatever_room_a_session_has():
    model = tiny_llama(1, max_position_embeddings=24)
    target = WatchedTarget(HFTarget(model))
    drafter = FunctionDrafter(lambda session, plan, depth: DraftTree.chain([session.ids[-1]] * (depth + 1)))
    engine = Engine(target, drafter, nodes=64)
    session = new_session(target, [3, 1, 4], 1000)
    engine.admit(session)
    while len(session.ids) < 24:
        engine.step([session])
    # The last rows stand at the last position that there is.
    assert max(int(forest.positions.max()) for forest in target.forests) == 23
    check_rows_equal_a_fresh_prefill(session, model)


@arch
def test_growing_keeps_the_rows():
    model = tiny_llama(2, max_position_embeddings=2048)
    target = HFTarget(model)
    ids = np.random.default_rng(0).integers(VOCAB, size=3 * BLOCK_ROWS).tolist()
    session = new_session(target, ids, 1)
    for end in (1, 5, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, len(ids) - 1):
        prefill(target, session.cache, ids[session.cache.length : end])
    check_rows_equal_a_fresh_prefill(session, model)


@arch
def test_a_copy_is_independent():
    model = tiny_llama(2)
    target = HFTarget(model)
    ids = [5, 6, 7, 8, 9, 10]
    session = new_session(target, ids, 1)
    prefill(target, session.cache, ids[:3])
    copy = session.cache.copy()
    prefill(target, copy, [1, 2, 3])
    prefill(target, session.cache, ids[3:-1])
    check_rows_equal_a_fresh_prefill(session, model)
    other = new_session(target, [5, 6, 7, 1, 2, 3, 0], 1)
    other.cache = copy
    check_rows_equal_a_fresh_prefill(other, model)


# --- TreeCache alone, against lists of numbers ------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(st.integers(1, 40), st.sets(st.integers(0, 39)), st.integers(0, 3)), min_size=1, max_size=25
)


@unit
@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.integers(0, 300))
def test_cache_is_a_list_from_which_paths_are_kept(operations, capacity):
    cache = TreeCache(2, capacity)
    kept: list[float] = []
    serial = 0.0
    for count, path, undo in operations:
        rows = [serial + i for i in range(count)]
        serial += count
        for layer in range(2):
            new = torch.tensor(rows).reshape(1, count, 1).expand(3, count, 2) + 0.25 * layer
            keys, values = cache.append(layer, new, -new[..., :1])
            assert keys[0, :, 0].tolist() == [row + 0.25 * layer for row in kept + rows]
            assert values.shape == (3, len(kept) + count, 1)
        chosen = sorted(row for row in path if row < count)
        cache.commit(chosen)
        kept += [rows[row] for row in chosen]
        if undo == 0:
            kept = kept[: len(kept) // 2]
            cache.truncate(len(kept))
        assert cache.length == len(kept)
        for layer in range(2):
            keys, values = cache.rows(layer)
            for head in range(3):
                assert keys[head, :, 1].tolist() == [row + 0.25 * layer for row in kept]
                assert values[head, :, 0].tolist() == [-row - 0.25 * layer for row in kept]


@unit
@pytest.mark.parametrize("rows", [[0, 0], [1, 0], [3], [-1], [0, 3], [0, 2, 1]])
def test_rows_that_were_not_written_cannot_be_committed(rows):
    cache = TreeCache(1)
    cache.append(0, torch.zeros(1, 3, 2), torch.zeros(1, 3, 2))
    with pytest.raises(ValueError, match="rows to commit must ascend below 3"):
        cache.commit(rows)
    assert cache.length == 0
    cache.commit([0, 2])
    assert cache.length == 2
    with pytest.raises(ValueError, match="rows to commit must ascend below 0"):
        cache.commit([0])


@unit
@pytest.mark.parametrize("length", [-1, 4])
def test_only_committed_rows_can_be_truncated(length):
    cache = TreeCache(1)
    cache.append(0, torch.zeros(1, 5, 2), torch.zeros(1, 5, 2))
    cache.commit([0, 1, 2])
    with pytest.raises(ValueError, match=r"length must lie in \[0, 3\]"):
        cache.truncate(length)


@unit
def test_memory_is_told_in_bytes():
    cache = TreeCache(2)
    assert cache.nbytes == 0
    for layer in range(2):
        cache.append(layer, torch.zeros(1, 3, 2, dtype=torch.float64), torch.zeros(1, 3, 4, dtype=torch.float64))
    assert cache.nbytes == 2 * BLOCK_ROWS * (2 + 4) * 8
    with pytest.raises(ValueError, match="layer 0 holds no rows yet"):
        TreeCache(1).rows(0)
