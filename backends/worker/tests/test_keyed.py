"""Keyed sampling has the right distribution, and depends on seed and position alone."""

import math

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from seer_worker.sampling import keyed  # noqa: E402
from seer_worker.sampling.keyed import cut, keyed_choices, verify  # noqa: E402
from seer_worker.sampling.noise import (  # noqa: E402
    ROUGH,
    gumbel,
    logarithm,
    mass,
    noise_steps,
    rough_gumbel,
    splitmix64,
)

from bench.gpu.drawn_cases import KINDS, draw  # noqa: E402

EULER = 0.5772156649015329
DRAWS = 1 << 18
GOLDEN_PLAIN = [38, 29, 37, 42, 50, 56, 45, 19, 6, 0, 5, 46, 4, 42, 15, 5]
GOLDEN_CUT = [38, 29, 52, 42, 32, 56, 45, 19, 9, 50, 5, 46, 19, 60, 50, 24]


def seeds(count, start=0):
    """Seeds as ``request_seed`` makes them: SplitMix64's outputs, 63 bits."""
    counter = torch.arange(start, start + count) * -7046029254386353131
    return splitmix64(counter) & (2**63 - 1)


def tokens_of(logits, rows_seeds, positions, temperature=1.0, top_k=None, top_p=None):
    rows = len(rows_seeds)
    return keyed_choices(
        logits.expand(rows, -1),
        torch.full((rows,), temperature),
        None if top_k is None else torch.full((rows,), top_k),
        None if top_p is None else torch.full((rows,), top_p),
        rows_seeds,
        positions,
    )


def assert_drawn_from(counts, probabilities):
    """Chi-square goodness of fit, five standard deviations wide."""
    expected = probabilities * counts.sum()
    assert expected.min() > 5
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def test_the_hash_is_splitmix64():
    outputs = splitmix64(1234567 + noise_steps(5))
    assert [value % 2**64 for value in outputs.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_a_hash_on_another_device_is_the_same():
    values = torch.arange(-500, 500) * 6364136223846793005

    class Elsewhere(torch.Tensor):
        """A tensor that says it is not on a CPU."""

        device = torch.device("meta")

    elsewhere = splitmix64(values.clone().as_subclass(Elsewhere))
    assert torch.equal(elsewhere.as_subclass(torch.Tensor), splitmix64(values.clone()))


def test_logarithm_and_mass_are_near_those_of_mathematics():
    x = torch.logspace(-60, 60, 100_001, base=2.0, dtype=torch.float64).float()
    assert (logarithm(x) - x.double().log()).abs().max() < 4e-6
    near = torch.linspace(0.5, 2, 100_001)
    assert (logarithm(near) - near.double().log()).abs().max() < 2e-7
    below = torch.linspace(-14, 0, 100_001)
    assert (mass(below) / 2.0**40 / below.double().exp() - 1).abs().max() < 4e-6
    assert mass(torch.tensor([-torch.inf, -33.0])).tolist() == [0, 0]
    assert mass(torch.zeros(1)).tolist() == [1 << 40]


def test_noise_is_the_double_logarithm_of_its_hash_down_to_the_rarest():
    keys = splitmix64(seeds(64) + (torch.arange(64) + 1) * -7046029254386353131)
    bits = splitmix64(keys[:, None] + noise_steps(4096)) & (2**63 - 1)
    exact = -(-torch.log1p(-(bits.double() / 2.0**63))).log()
    off = (gumbel(seeds(64), torch.arange(64), noise_steps(4096)) - exact).abs()
    assert off[exact > -1].max() < 2e-6
    assert off.max() < 2e-3  # where the uniform is nearly 1, and the token is not drawn


def test_rough_noise_is_near_enough_for_candidates():
    arguments = seeds(64), torch.arange(64), noise_steps(16_384)
    rough = torch.from_numpy(rough_gumbel(*(each.numpy() for each in arguments)))
    assert (gumbel(*arguments) - rough).abs().max() < ROUGH / 50


@pytest.mark.parametrize("seed", range(2 * len(KINDS)))
def test_a_cpu_s_candidates_have_the_chosen_token_among_them(seed):
    case = draw(seed, 2_000, 41)
    assert torch.equal(keyed_choices(**case), keyed._chosen(**case))


def test_tokens_stay_what_they_have_always_been():
    positions = torch.arange(16) * 37
    logits = torch.arange(16 * 61, dtype=torch.float32).reshape(16, 61).mul_(0.37).sin_().mul_(4)
    ones = torch.ones(16)
    plain = keyed_choices(logits, ones, None, None, seeds(16), positions)
    within = keyed_choices(logits, ones * 0.7, torch.full((16,), 8), ones * 0.9, seeds(16), positions)
    assert plain.tolist() == GOLDEN_PLAIN
    assert within.tolist() == GOLDEN_CUT


def test_the_noise_has_the_moments_and_the_tail_of_a_gumbel():
    noise = gumbel(seeds(1 << 15), torch.arange(1 << 15), noise_steps(128)).double()
    count = noise.numel()
    deviation = math.pi / math.sqrt(6)
    scaled = (noise - EULER) / deviation
    assert abs(scaled.mean()) < 5 / math.sqrt(count)
    assert abs(scaled.pow(2).mean() - 1) < 5 * math.sqrt(4.4 / count)
    assert abs(scaled.pow(3).mean() - 1.1395) < 5 * math.sqrt(90 / count)
    for level in (4.0, 8.0, 11.0):
        expected = -math.expm1(-math.exp(-level)) * count
        assert abs((noise > level).sum() - expected) < 5 * math.sqrt(expected)


def test_the_noise_is_finite_at_both_ends_of_the_hash():
    noise = gumbel(seeds(512), torch.arange(512), noise_steps(1 << 14))
    assert noise.isfinite().all()
    assert noise.min() > -3
    assert noise.max() < 45


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_tokens_are_drawn_from_the_softmax(temperature):
    logits = torch.linspace(-2, 2, 37).roll(11) * 1.3
    tokens = tokens_of(logits, seeds(DRAWS), torch.arange(DRAWS) % 977, temperature)
    assert_drawn_from(tokens.bincount(minlength=37), (logits / temperature).double().softmax(-1))


@pytest.mark.parametrize(
    ("other_seed", "other_position"),
    [(0, 1), (1, 0), (1, -1), (0, 64)],
    ids=["next position", "next seed", "neighbours", "a chunk later"],
)
def test_draws_at_other_positions_and_seeds_are_independent(other_seed, other_position):
    logits = torch.tensor([0.3, -1.0, 0.0, 1.0, 0.5])
    # Raw neighbouring integers: the worst seeds a user may choose.
    base, positions = torch.arange(DRAWS), 100 + torch.arange(DRAWS) % 50
    first = tokens_of(logits, base, positions)
    second = tokens_of(logits, base + other_seed, positions + other_position)
    p = logits.double().softmax(-1)
    assert_drawn_from((first * 5 + second).bincount(minlength=25), torch.outer(p, p).flatten())


def test_noise_of_neighbouring_tokens_is_uncorrelated():
    noise = gumbel(seeds(1 << 12), torch.arange(1 << 12), noise_steps(257)).double()
    scaled = (noise - noise.mean()) / noise.std()
    for lag in (1, 2, 64, 128):
        product = scaled[:, lag:] * scaled[:, :-lag]
        assert abs(product.mean()) < 5 / math.sqrt(product.numel())


def test_a_row_is_the_same_in_every_batch():
    logits = torch.randn(48, 131, generator=torch.Generator().manual_seed(3)) * 3
    rows_seeds, positions = seeds(48), torch.arange(48) * 7
    arguments = logits, torch.ones(48), torch.full((48,), 40), torch.full((48,), 0.9), rows_seeds, positions
    together = keyed_choices(*arguments)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 40), slice(47, 48)):
        assert torch.equal(keyed_choices(*(each[rows] for each in arguments)), together[rows])


@pytest.mark.parametrize("block", [1, 131, 1000])
def test_rows_chosen_in_blocks_are_the_same(monkeypatch, block):
    rows = 30
    logits = torch.randn(rows, 131, generator=torch.Generator().manual_seed(4)) * 3
    arguments = (
        logits,
        torch.tensor([0.0, 0.7, 1.0]).repeat(rows // 3),
        torch.arange(1, rows + 1),
        torch.full((rows,), 0.9),
        seeds(rows),
        torch.arange(rows) * 5,
    )
    together = keyed_choices(*arguments)
    monkeypatch.setattr(keyed, "CPU_BLOCK", block)
    assert torch.equal(keyed_choices(*arguments), together)


def test_temperature_zero_is_greedy_beside_random_rows():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([0.0, 1.0]).repeat(32)
    tokens = keyed_choices(logits, temperature, None, None, seeds(64), torch.arange(64))
    assert torch.equal(tokens[::2], logits[::2].argmax(-1))
    assert not torch.equal(tokens[1::2], logits[1::2].argmax(-1))


def kept_by_definition(logits, k, p):
    """Top-k then top-p of one row, by the book: a set of token ids."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:k]
    weights = [math.exp(logits[i]) for i in order]
    kept, mass = set(), 0.0
    for i, weight in zip(order, weights, strict=True):
        if mass >= p * sum(weights):
            break
        kept.add(i)
        mass += weight
    return kept


@pytest.mark.parametrize(("k", "p"), [(5, 1.0), (50, 0.7), (12, 0.6), (1, 0.5), (50, 1e-6), (50, 1.0)])
def test_the_masks_keep_exactly_top_k_and_top_p(k, p):
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(2)) * 2
    masked = cut(logits, torch.ones(20), torch.full((20,), k), torch.full((20,), p))
    for row, original in zip(masked, logits, strict=True):
        assert set(row.isfinite().nonzero().flatten().tolist()) == kept_by_definition(original.tolist(), k, p)


def test_equal_logits_stay_or_go_together():
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0]])
    ones = torch.ones(1)
    assert cut(logits, ones, torch.tensor([3]), None).isfinite().tolist() == [[True] * 5]
    assert cut(logits, ones, torch.tensor([2]), None).isfinite().tolist() == [
        [False, True, False, True, False]
    ]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_min_p_leaves_tokens_whose_share_of_the_highest_probability_is_large_enough(temperature):
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(6)) * 2
    least = torch.linspace(0.0, 0.95, 20)
    kept = cut(logits, torch.full((20,), temperature), None, None, least).isfinite()
    probabilities = (logits.double() / temperature).softmax(-1)
    assert torch.equal(kept, probabilities >= least[:, None] * probabilities.amax(-1, keepdim=True))


def test_masked_tokens_are_never_drawn_and_the_rest_keep_their_odds():
    logits = torch.linspace(-1, 2, 12)
    tokens = tokens_of(logits, seeds(DRAWS), torch.arange(DRAWS), top_k=6, top_p=0.8)
    kept = cut(logits[None], torch.ones(1), torch.tensor([6]), torch.tensor([0.8]))[0]
    counts = tokens.bincount(minlength=12)
    inside = kept.isfinite()
    assert counts[~inside].sum() == 0
    assert 1 < inside.sum() < 6
    assert_drawn_from(counts[inside], kept[inside].double().softmax(-1))


def followed_by_definition(sampled, drafts, last):
    """Return what a request without drafts would give, as far as its drafts were right."""
    tokens = []
    for place, token in enumerate(sampled):
        tokens.append(token)
        if place == len(drafts) or drafts[place] != token or token in last:
            break
    return tokens


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=6).flatmap(
            lambda drafts: st.tuples(st.just(drafts), st.integers(0, 3))
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 60),
    st.sampled_from([[], [2], [0, 3]]),
)
def test_each_row_is_followed_to_its_first_mismatch_and_no_further(requests, rows_at_once, last):
    drafts = [[token for token, _ in row] for row, _ in requests]
    sampled = [
        [*(token if right else (token + 1) % 4 for token, right in row), bonus] for row, bonus in requests
    ]
    flat = np.array([token for row in sampled for token in row])
    looked_at = []

    def choose(rows):
        assert (np.diff(rows) > 0).all()
        looked_at.extend(rows.tolist())
        return flat[rows]

    counts = np.array([len(row) for row in drafts])
    found, kept = verify(
        choose, counts, np.array([t for row in drafts for t in row], np.int32), np.array(last), rows_at_once
    )
    expected = [followed_by_definition(*pair, last) for pair in zip(sampled, drafts, strict=True)]
    rows = np.split(found, np.cumsum(counts + 1)[:-1])
    assert [row[:count].tolist() for row, count in zip(rows, kept, strict=True)] == expected
    assert len(looked_at) == len(set(looked_at))
    if rows_at_once == 1:
        assert len(looked_at) == sum(map(len, expected))
