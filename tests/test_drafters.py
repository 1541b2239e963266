"""A drafter may be wrong, slow or broken: the text stays right, one warning says so, and no memory grows."""

import gc
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import greedy_text, random_prompts

from treepass.drafters import NoDrafter, RandomDrafter, RecyclingDrafter, SuffixDrafter, UnionDrafter, build_drafter
from treepass.drafters.base import Candidates, Outcome, Plan
from treepass.drafters.expand import PATH_PROB_FLOOR, best_first
from treepass.drafters.recycling import RecyclingTable
from treepass.drafters.suffix import MAX_CONTINUATIONS, ORDERS, NGramIndex
from treepass.errors import TreepassWarning
from treepass.generate import DEFAULT_NODES, TreeDecoder
from treepass.sampling import Sampler, SamplingParams
from treepass.testing import FunctionDrafter, random_tree, tiny_llama
from treepass.tree import DraftTree

unit = pytest.mark.unit
arch = pytest.mark.arch
slow = pytest.mark.slow

VOCAB = 64
PROMPTS = [[7, 3, 11, 7, 3], [1], [9, 9, 9, 2]]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(3, vocab_size=VOCAB, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def plain(model):
    """What plain decoding writes, greedily and sampled."""
    decoder = TreeDecoder(model, "none")
    return {
        "greedy": decoder.generate(PROMPTS, max_new_tokens=20).ids,
        "sampled": decoder.generate(PROMPTS, max_new_tokens=20, **SAMPLED).ids,
    }


def check_text(model, drafter_of, plain, expect_warning: str | None) -> list:
    """Texts equal those of plain decoding; one warning if any, in the report too."""
    outputs = []
    for kind, options in (("greedy", {}), ("sampled", SAMPLED)):
        decoder = TreeDecoder(model, drafter_of())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = decoder.generate(PROMPTS, max_new_tokens=20, **options)
        assert output.ids == plain[kind]
        messages = [str(warning.message) for warning in caught if warning.category is TreepassWarning]
        assert messages == output.report.warnings
        assert len(messages) == (expect_warning is not None)
        if expect_warning:
            assert expect_warning in messages[0]
            assert "drafting is switched off for this request" in messages[0]
            assert "\n" not in messages[0]
        outputs.append(output)
    return outputs


# --- drafters that fail -----------------------------------------------------------------------------------------------


class Failing(RandomDrafter):
    """Raises in one of its hooks, at the given call of it."""

    name = "failing"

    def __init__(self, hook: str, call: int, error: BaseException) -> None:
        super().__init__(VOCAB)
        self.calls = {"begin": 0, "propose": 0, "observe": 0, "end": 0}
        self.hook, self.call, self.error = hook, call, error

    def _count(self, hook: str) -> None:
        self.calls[hook] += 1
        if hook == self.hook and self.calls[hook] == self.call:
            raise self.error

    def begin(self, *args):
        self._count("begin")
        return super().begin(*args)

    def propose(self, *args):
        self._count("propose")
        return super().propose(*args)

    def observe(self, *args):
        self._count("observe")
        return super().observe(*args)

    def end(self, *args):
        self._count("end")
        return super().end(*args)


@arch
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("hook", ["begin", "propose", "observe", "end"])
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyError("gone"), MemoryError()], ids=repr)
def test_a_drafter_that_raises_costs_speed_alone(model, plain, hook, call, error):
    outputs = check_text(model, lambda: Failing(hook, call, error), plain, f"drafter 'failing' failed in {hook}")
    for output in outputs:
        assert type(error).__name__ in output.report.warnings[0]
        if hook == "begin":
            assert output.report.nodes == 0
        if hook in ("propose", "observe"):
            after = [record.nodes for record in output.records if record.index >= call]
            assert after
            assert set(after) == {0}


@arch
def test_a_message_of_several_lines_makes_a_warning_of_one(model, plain):
    check_text(model, lambda: Failing("propose", 2, RuntimeError("one\ntwo\n\nthree")), plain, "failed in propose")


@arch
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_drafter_does_not_swallow_an_interrupt(model, error):
    with pytest.raises(error):
        TreeDecoder(model, Failing("propose", 2, error())).generate(PROMPTS, max_new_tokens=20)


@arch
def test_a_failed_drafter_is_tried_again_with_the_next_request(model, plain):
    decoder = TreeDecoder(model, Failing("propose", 1, RuntimeError("once")))
    with pytest.warns(TreepassWarning, match="once"):
        decoder.generate(PROMPTS, max_new_tokens=20)
    output = decoder.generate(PROMPTS, max_new_tokens=20)
    assert output.ids == plain["greedy"]
    assert output.report.nodes > 0
    assert output.report.warnings == []


# --- drafters that lie ------------------------------------------------------------------------------------------------


def proposing(tree_of):
    return lambda: FunctionDrafter(lambda session, plan, depth: tree_of(session.ids[-1], plan, depth))


class WrongCount(NoDrafter):
    name = "wrong count"

    def __init__(self, change: int) -> None:
        self.change = change

    def propose(self, sessions, plan):
        return [DraftTree.chain([sessions[0].ids[-1], 1])] * (len(sessions) + self.change)


LIES = {
    "one tree too few": (lambda: WrongCount(-1), "got 2 for 3"),
    "one tree too many": (lambda: WrongCount(1), "got 4 for 3"),
    "wrong root": (proposing(lambda root, *_: DraftTree.chain([(root + 1) % VOCAB, 4])), "the root must carry"),
    "token outside": (proposing(lambda root, *_: DraftTree.chain([root, VOCAB])), "node 1: token must be below"),
    "large token": (proposing(lambda root, *_: DraftTree.chain([root, 2**40])), "node 1: token must be below"),
    "negative token": (proposing(lambda root, *_: DraftTree.chain([root, -1])), "node 1: token must be >= 0"),
    "NaN": (proposing(lambda root, *_: DraftTree.chain([root, 1], [1, float("nan")])), "must be finite, got nan"),
    "rising": (proposing(lambda root, *_: DraftTree.chain([root, 1, 2], [1, 0.1, 0.2])), "must not exceed"),
    "child first": (proposing(lambda root, *_: DraftTree.from_parents([root, 1, 2], [-1, 2, 0])), "earlier row"),
    "equal siblings": (proposing(lambda root, *_: DraftTree.from_parents([root, 1, 1], [-1, 0, 0])), "same token"),
    "no tree": (proposing(lambda *_: None), "failed in propose"),
    "tokens": (proposing(lambda root, *_: [root, 1, 2]), "failed in propose"),
    "nothing": (lambda: Nothing(), "failed in propose"),
}


class Nothing(NoDrafter):
    name = "nothing"

    def propose(self, sessions, plan):
        return None


@arch
@pytest.mark.parametrize("lie", LIES)
def test_a_drafter_that_lies_costs_speed_alone(model, plain, lie):
    drafter_of, message = LIES[lie]
    for output in check_text(model, drafter_of, plain, message):
        assert output.report.nodes == 0


@arch
@pytest.mark.parametrize(
    "tree_of",
    [
        lambda root, plan, depth: DraftTree.chain([root] * (depth + 30)),
        lambda root, plan, depth: DraftTree.from_parents([root, *range(VOCAB)], [-1] + [0] * VOCAB),
        lambda root, plan, depth: random_tree(
            np.random.default_rng(root), root, nodes=600, max_depth=9, vocab_size=VOCAB
        ),
    ],
    ids=["too deep", "too wide", "too many nodes"],
)
def test_a_draft_beyond_the_plan_is_cut_to_it(model, plain, tree_of):
    for output in check_text(model, proposing(tree_of), plain, None):
        assert 0 < max(record.nodes for record in output.records) <= DEFAULT_NODES
        for record in output.records:
            tree = DraftTree.from_parents(record.tokens, record.parents, record.path_prob)
            written = sum(
                len(r.emitted) for r in output.records if r.sequence == record.sequence and r.index < record.index
            )
            assert tree.max_depth <= 20 - written - 1


# --- drafters that are never right ------------------------------------------------------------------------------------


def never_right(text_of):
    """Drafts tokens other than the true next one."""

    def tree_of(session, plan, depth):
        true = text_of(session)
        wrong = [token for token in range(VOCAB) if token != true][:4]
        return DraftTree.from_parents([session.ids[-1], *wrong], [-1, 0, 0, 0, 0])

    return FunctionDrafter(tree_of)


@arch
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_drafter_that_is_never_right_is_switched_off_with_one_warning(model, options):
    prompt = PROMPTS[0]
    expected = TreeDecoder(model, "none").generate(prompt, max_new_tokens=80, **options).ids
    decoder = TreeDecoder(model, never_right(lambda session: expected[0][len(session.ids) - len(prompt)]))
    with pytest.warns(TreepassWarning) as caught:
        output = decoder.generate(prompt, max_new_tokens=80, **options)
    assert output.ids == expected
    assert len(caught) == 1
    assert output.report.warnings == [str(caught[0].message)]
    assert "no node of drafter 'function' was accepted" in output.report.warnings[0]
    nodes = [record.nodes for record in output.records]
    last = max(place for place, count in enumerate(nodes) if count)
    assert set(nodes[: last + 1]) == {4}
    assert set(nodes[last + 1 :]) == {0}
    assert 8 <= last + 1 <= 64
    # With the next request it gets another chance.
    with pytest.warns(TreepassWarning):
        assert decoder.generate(prompt, max_new_tokens=80, **options).report.nodes > 0


@arch
def test_a_drafter_that_is_right_now_and_then_stays_on(model):
    prompt = PROMPTS[0]
    expected = TreeDecoder(model, "none").generate(prompt, max_new_tokens=120).ids[0]

    def tree_of(session, plan, depth):
        done = len(session.ids) - len(prompt)
        true = expected[done]
        return DraftTree.chain([session.ids[-1], true if done % 20 == 0 else (true + 1) % VOCAB])

    output = TreeDecoder(model, FunctionDrafter(tree_of)).generate(prompt, max_new_tokens=120)
    assert output.ids == [expected]
    assert output.report.warnings == []
    assert output.records[-2].nodes == 1


# --- hooks ------------------------------------------------------------------------------------------------------------


class Diary(RandomDrafter):
    """Notes what it is told."""

    name = "diary"

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.live: set[int] = set()
        self.begun = self.ended = 0

    def begin(self, session, *args):
        self.begun += 1
        self.live.add(id(session))

    def observe(self, sessions, outcomes):
        for session, outcome in zip(sessions, outcomes, strict=True):
            assert tuple(session.ids[-len(outcome.emitted) :]) == outcome.emitted
            root = session.ids[-len(outcome.emitted) - 1]
            assert int(outcome.tree.tokens[0]) == root
            assert outcome.tree.tokens[list(outcome.path)].tolist() == list(outcome.emitted[: len(outcome.path)])

    def end(self, session):
        self.ended += 1
        self.live.remove(id(session))


@arch
def test_every_sequence_begins_and_ends(model):
    diary = Diary()
    TreeDecoder(model, diary).generate(PROMPTS, max_new_tokens=10, num_return_sequences=2, temperature=1.0)
    assert (diary.begun, diary.ended, diary.live) == (6, 6, set())


@arch
def test_a_sequence_ends_for_its_drafter_after_an_error_too(model):
    diary = Diary()

    def fail(record):
        raise RuntimeError("callback")

    with pytest.raises(RuntimeError, match="callback"):
        TreeDecoder(model, diary).generate(PROMPTS, max_new_tokens=10, callback=fail)
    assert (diary.begun, diary.ended, diary.live) == (3, 3, set())


@arch
def test_a_sequence_ends_for_its_drafter_after_drafting_was_switched_off(model):
    class Hopeless(Diary):
        def propose(self, sessions, plan):
            raise RuntimeError("hopeless")

    diary = Hopeless()
    with pytest.warns(TreepassWarning, match="hopeless"):
        TreeDecoder(model, diary).generate(PROMPTS, max_new_tokens=10)
    assert (diary.begun, diary.ended, diary.live) == (3, 3, set())


@arch
def test_a_sequence_ends_for_its_drafter_after_prefill_failed(model):
    diary = Diary()
    decoder = TreeDecoder(model, diary)
    forward, calls = decoder.target.forward, 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    decoder.target.forward = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.generate([PROMPTS[0], PROMPTS[2]], max_new_tokens=10)
    assert (diary.begun, diary.ended, diary.live) == (1, 1, set())


@arch
@pytest.mark.parametrize("name", ["suffix", "recycling", "auto"])
@pytest.mark.parametrize("memory", [True, False])
def test_memory_over_requests_changes_no_text_and_can_be_switched_off(model, name, memory):
    decoder = TreeDecoder(model, name, memory=memory)
    expected = greedy_text(model, PROMPTS[0], 40)
    passes = [decoder.generate(PROMPTS[0], max_new_tokens=40) for _ in range(3)]
    assert [output.ids for output in passes] == [[expected]] * 3
    counts = [output.report.passes for output in passes]
    if memory:
        assert counts[1] < counts[0]
        decoder.drafter.reset()
        assert decoder.generate(PROMPTS[0], max_new_tokens=40).report.passes == counts[0]
    else:
        assert len(set(counts)) == 1


# --- trees of the drafters --------------------------------------------------------------------------------------------


class Sequence:
    """The least that a drafter needs to see."""

    def __init__(self, ids, **params) -> None:
        self.ids = list(ids)
        self.prompt_length = len(self.ids)
        self.sampler = Sampler(SamplingParams(**params))


@unit
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.8, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["suffix", "recycling", "auto", "random", "none"])
def test_drafts_keep_to_the_plan(name, params):
    drafter = build_drafter(name, vocab_size=VOCAB)
    rng = np.random.default_rng(0)
    sessions = [Sequence(rng.integers(6, size=40), **params) for _ in range(3)]
    for session in sessions:
        drafter.begin(session, None)
    for _ in range(30):
        plan = Plan(int(rng.integers(1, 30)), tuple(int(d) for d in rng.integers(0, 6, size=3)))
        trees = drafter.propose(sessions, plan)
        assert len(trees) == 3
        outcomes = []
        for session, tree, depth in zip(sessions, trees, plan.depths, strict=True):
            assert int(tree.tokens[0]) == session.ids[-1]
            assert tree.max_depth <= depth
            assert tree.nodes <= plan.nodes * (2 if name == "auto" else 1)
            tree.check_vocabulary(VOCAB)
            logprobs = np.log(np.sort(rng.dirichlet(np.ones(6), size=tree.rows))[:, ::-1])
            tokens = np.array([rng.permutation(6) for _ in range(tree.rows)])
            emitted = (int(rng.integers(6)),)
            session.ids += emitted
            outcomes.append(Outcome(tree, (), emitted, Candidates(tokens, logprobs)))
        drafter.observe(sessions, outcomes)
    if name not in ("none", "random"):
        assert any(tree.nodes for tree in trees)
    for session in sessions:
        drafter.end(session)


@unit
def test_suffix_drafts_what_followed_before():
    drafter = SuffixDrafter()
    session = Sequence([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    drafter.begin(session, None)
    (tree,) = drafter.propose([session], Plan(16, (4,)))
    paths = [tree.tokens[tree.path(row)].tolist() for row in range(tree.rows)]
    assert [4, 5, 6, 7] in paths
    assert [4, 5, 6, 7, 8] not in paths


@unit
def test_recycling_drafts_what_the_target_thought_of_before():
    drafter = RecyclingDrafter()
    session = Sequence([1, 2])
    drafter.begin(session, None)
    (root,) = drafter.propose([session], Plan(8, (4,)))
    assert root.nodes == 0
    tokens = np.array([[5, 6, 7]])
    session.ids.append(5)
    drafter.observe([session], [Outcome(root, (), (5,), Candidates(tokens, np.log([[0.6, 0.3, 0.1]])))])
    session.ids += [1, 2]
    (tree,) = drafter.propose([session], Plan(8, (4,)))
    assert set(tree.children(0)) >= {5, 6}
    assert tree.ranks()[tree.child(0, 5)] == 0


@unit
def test_union_joins_what_its_parts_propose():
    parts = [
        FunctionDrafter(lambda session, *_: DraftTree.chain([session.ids[-1], 1, 2], [1.0, 0.5, 0.4])),
        FunctionDrafter(lambda session, *_: DraftTree.from_parents([session.ids[-1], 1, 3], [-1, 0, 1], [1, 0.7, 0.1])),
    ]
    union = UnionDrafter(parts)
    assert union.name == "function+function"
    (tree,) = union.propose([Sequence([9])], Plan(8, (4,)))
    found = {tuple(tree.tokens[tree.path(row)].tolist()): tree.path_prob[row] for row in range(1, tree.rows)}
    assert found == {(1,): 0.7, (1, 2): 0.4, (1, 3): 0.1}
    with pytest.raises(ValueError, match="at least one drafter"):
        UnionDrafter([])


@unit
@pytest.mark.parametrize("nodes", [0, 1, 5, 40])
def test_best_first_takes_the_likeliest_paths(nodes):
    law = {0: 0.5, 1: 0.3, 2: 0.15}
    tree = best_first((7, 3), lambda context, depth: law.items(), nodes, 3, 2)
    everything = sorted(
        (float(np.prod([law[token] for token in path])) for depth in (1, 2, 3) for path in np.ndindex(*(3,) * depth)),
        reverse=True,
    )
    worth = [prob for prob in everything[:nodes] if prob >= PATH_PROB_FLOOR]
    assert sorted(tree.path_prob[1:].tolist(), reverse=True) == pytest.approx(worth)
    assert tree.max_depth <= 3


# --- tables with a bound ----------------------------------------------------------------------------------------------


@unit
@given(st.lists(st.integers(0, 4), min_size=2, max_size=150), st.integers(1, 40))
def test_the_index_knows_its_window_and_nothing_older(text, window):
    index = NGramIndex(window)
    index.extend(text, 1)
    assert len(index) == min(window, len(text) - 1)
    recent = range(max(1, len(text) - window), len(text))
    expected: dict[tuple[int, ...], dict[int, int]] = {}
    for place in recent:
        for order in ORDERS:
            if order <= place:
                followers = expected.setdefault(tuple(text[place - order : place]), {})
                followers[text[place]] = followers.get(text[place], 0) + 1
    assert index.entries == len(expected)
    for context, followers in expected.items():
        order, found = index.followers(context)
        assert order == len(context)
        assert dict(zip(found[::2], found[1::2], strict=True)) == followers
    # The most recently seen follower stands last.
    order, found = index.followers(tuple(text[:-1]))
    assert found[-2] == text[-1]


@unit
def test_the_index_stays_at_its_bound():
    rng = np.random.default_rng(0)
    index = NGramIndex(100)
    sizes = []
    text = rng.integers(30, size=3000).tolist()
    for place in range(1, len(text)):
        index.add(text[max(0, place - 8) : place], text[place])
        sizes.append((len(index), index.entries))
    assert {length for length, _ in sizes[100:]} == {100}
    assert max(entries for _, entries in sizes) <= 100 * len(ORDERS)
    assert index.followers(tuple(text[:8]))[0] < 8
    common = index.common() if hasattr(index, "common") else []
    assert len(common) <= 30


@unit
def test_followers_of_one_context_are_bounded():
    index = NGramIndex(10_000)
    for token in range(100):
        index.add([1], token)
    _, found = index.followers((1,))
    assert found[::2] == list(range(100 - MAX_CONTINUATIONS, 100))


@unit
def test_the_table_stays_at_its_capacity_and_forgets_the_oldest():
    table = RecyclingTable(capacity=10)
    entry = ((1, 2), (-0.1, -2.0))
    for token in range(25):
        table.write(token - 1 if token else None, token, entry)
        assert len(table) <= 20
    assert len(table) == 20
    assert table.read((23, 24)) == (2, entry)
    assert table.read((99, 24)) == (1, entry)
    assert table.read((13, 14)) == (0, ((), ()))
    assert table.read((14, 15)) == (2, entry)
    # Writing again makes a context young again.
    table.write(14, 15, entry)
    for token in range(100, 109):
        table.write(token - 1, token, entry)
    assert table.read((14, 15)) == (2, entry)
    assert table.read((23, 24))[0] == 0
    table.write(14, 200, entry)
    assert table.read((14, 15))[0] == 0


# --- memory -----------------------------------------------------------------------------------------------------------


def half_of_the_vocabulary(session, plan, depth):
    """A draft of which some node is accepted every other pass, so that drafting goes on."""
    return DraftTree.from_parents([session.ids[-1], *range(VOCAB // 2)], [-1] + [0] * (VOCAB // 2))


def footprints(decoder, tokens: int, requests: int) -> np.ndarray:
    """[requests, 2]: live objects and traced bytes after every request, each with another text."""
    found = []
    tracemalloc.start()
    try:
        for seed, prompt in enumerate(random_prompts(requests, VOCAB, seed=3)):
            output = decoder.generate(
                prompt, max_new_tokens=tokens, temperature=1.0, seed=seed, keep_records=False, eos_token_id=[]
            )
            assert output.report.warnings == []
            del output
            gc.collect()
            found.append((len(gc.get_objects()), tracemalloc.get_traced_memory()[0]))
    finally:
        tracemalloc.stop()
    return np.array(found)


def with_memory(name: str, memory: bool) -> UnionDrafter:
    """The drafter of that name, and one that keeps it from being switched off."""
    return UnionDrafter([build_drafter(name, vocab_size=VOCAB, memory=memory), FunctionDrafter(half_of_the_vocabulary)])


@arch
@pytest.mark.parametrize("name", ["none", "random", "suffix", "recycling", "auto"])
def test_requests_leave_nothing_behind(model, name):
    found = footprints(TreeDecoder(model, with_memory(name, False), nodes=40), tokens=40, requests=6)
    assert found[-1, 0] - found[1, 0] < 50
    # An index or a table left behind by each request would take more.
    assert found[-1, 1] - found[1, 1] < 100_000


@arch
@pytest.mark.parametrize("name", ["suffix", "recycling", "auto"])
def test_tables_are_all_that_grows_and_they_are_bounded(monkeypatch, model, name):
    import treepass.drafters.suffix

    monkeypatch.setattr(treepass.drafters.suffix, "WINDOW_TOKENS", 60)
    monkeypatch.setattr(treepass.drafters.suffix, "MEMORY_TOKENS", 60)
    monkeypatch.setattr(RecyclingTable.__init__, "__defaults__", (40,))
    found = footprints(TreeDecoder(model, with_memory(name, True), nodes=40), tokens=100, requests=6)
    # The first request fills the tables.
    filled, last = found[1:3].max(0), found[-1]
    assert last[0] - filled[0] < 200
    assert last[1] - filled[1] < 50_000


@arch
@slow
@pytest.mark.parametrize("drafted", [False, True])
def test_1000_passes_leave_nothing_behind_but_rows(model, drafted):
    check_passes(model, 1000, drafted)


@arch
def test_200_passes_leave_nothing_behind_but_rows(model):
    check_passes(model, 200, drafted=True)


def check_passes(model, wanted: int, drafted: bool) -> None:
    """Within one request objects and bytes do not grow with the passes, but for the ids; records are not kept."""
    found = []
    passes = 0

    def count(record):
        nonlocal passes
        passes += 1
        if passes % (wanted // 4) == 0:
            gc.collect()
            found.append((len(gc.get_objects()), tracemalloc.get_traced_memory()[0]))

    drafter = FunctionDrafter(half_of_the_vocabulary) if drafted else "none"
    decoder = TreeDecoder(model, drafter, nodes=VOCAB // 2)
    tracemalloc.start()
    try:
        output = decoder.generate(
            [7, 3],
            max_new_tokens=2 * wanted,
            temperature=1.0,
            seed=1,
            keep_records=False,
            callback=count,
            eos_token_id=[],
        )
    finally:
        tracemalloc.stop()
    assert passes >= wanted
    assert output.report.warnings == []
    assert (output.report.accepted > 0) == drafted
    objects, size = np.array(found).T
    assert objects.max() - objects[0] < 50
    # The text itself grows by one Python integer and one list entry per token, and by two floats, its log-probability
    # and its score; a record would take kilobytes. Free lists of torch and Python hold up to 200 bytes per pass.
    assert size[-1] - size[0] < 200 * passes + 20 * output.report.emitted + 20_000


@arch
def test_a_decoder_lets_its_sequences_go(model):
    """No cache outlives its request."""

    def buffers() -> int:
        gc.collect()
        return sum(type(thing) is torch.Tensor and thing.dim() == 3 for thing in gc.get_objects())

    decoder = TreeDecoder(model)
    decoder.generate(PROMPTS, max_new_tokens=10)
    before = buffers()
    for _ in range(5):
        decoder.generate(PROMPTS, max_new_tokens=10)
    assert buffers() == before


class Listening(NoDrafter):
    """Keeps what it is told of the prompt."""

    name = "listening"
    candidates = 5

    def __init__(self, prompt_rows: int) -> None:
        self.prompt_rows = prompt_rows
        self.heard: list[Candidates | None] = []

    def begin(self, session, prompt):
        self.heard.append(prompt)


@arch
@pytest.mark.parametrize(("length", "wanted"), [(9, 4), (9, 8), (9, 100), (2, 4), (1, 4), (9, 0), (513, 30), (514, 30)])
def test_candidates_of_the_prompt_are_those_of_its_last_rows(length, wanted):
    model = tiny_llama(2, vocab_size=VOCAB, max_position_embeddings=600)
    drafter = Listening(wanted)
    prompt = np.random.default_rng(0).integers(VOCAB, size=length).tolist()
    TreeDecoder(model, drafter).generate(prompt, max_new_tokens=1)
    (heard,) = drafter.heard
    rows = min(wanted, length - 1)
    if rows == 0:
        assert heard is None
        return
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1 - rows : -1].log_softmax(-1).topk(5)
    assert heard.tokens.tolist() == expected.indices.tolist()
    assert np.allclose(heard.logprobs, expected.values.numpy(), atol=1e-5)


@unit
def test_recycling_reads_the_prompt():
    drafter = RecyclingDrafter()
    session = Sequence([1, 2, 3, 1])
    drafter.begin(session, Candidates(np.array([[7, 8], [9, 10]]), np.log([[0.9, 0.05], [0.6, 0.3]])))
    session.ids += [2]
    (tree,) = drafter.propose([session], Plan(8, (3,)))
    assert set(tree.children(0)) == {7, 8}
    session.ids += [3]
    (tree,) = drafter.propose([session], Plan(8, (3,)))
    assert set(tree.children(0)) == {9, 10}


@unit
def test_recycling_tries_the_runners_up_below_the_root_alone():
    drafter = RecyclingDrafter()
    session = Sequence([1])
    drafter.begin(session, None)
    session.ids += [5]
    candidates = Candidates(np.array([[5, 6, 7, 8, 9]]), np.log([[0.5, 0.2, 0.15, 0.1, 0.05]]))
    drafter.observe([session], [Outcome(DraftTree.root_only(1), (), (5,), candidates)])
    (tree,) = drafter.propose([session], Plan(8, (3,)))
    assert set(tree.children(0)) == {6, 7, 8}
    assert tree.max_depth == 1


@unit
def test_suffix_falls_back_on_the_commonest_recent_tokens():
    drafter = SuffixDrafter()
    session = Sequence([4, 4, 4, 4, 4, 4, 9, 8, 9, 7, 9, 5, 40])
    drafter.begin(session, None)
    (tree,) = drafter.propose([session], Plan(8, (1,)))
    ranked = sorted(tree.children(0), key=lambda token: -tree.path_prob[tree.child(0, token)])
    assert ranked[:2] == [4, 9]


@unit
@pytest.mark.parametrize("wrong", [5, object(), RandomDrafter], ids=["number", "object", "class"])
def test_what_is_no_drafter_is_refused_at_once(wrong):
    with pytest.raises(ValueError, match="a drafter needs "):
        build_drafter(wrong, vocab_size=VOCAB)
