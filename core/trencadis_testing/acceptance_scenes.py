"""Small worlds in which an acceptance rule can be proven: every draft, sample and stop is enumerated, and nothing is drawn.

    scene: shape of the drafts, distributions of model and drafter ─ cases: all drafts, with their probabilities ─▶ Verification
    rule.accept, rule.last ─ weights of the ends of verification ─▶ distribution of the next tokens, compared with the model's

Shapes: B cases, N drafts, V vocabulary, H tokens that a text has at least after the step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.interfaces import AcceptanceRule, Verification

__all__ = [
    "Cases",
    "Emission",
    "Distribution",
    "Scene",
    "emission",
    "greedy",
    "distributions",
    "model_distribution",
    "verification_of",
]

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Distribution = Callable[[tuple[int, ...]], Float]
"""From the tokens after the newest one to the distribution of the next token, ``[V]``."""


def distributions(seed: int, vocab_size: int, *, num_impossible: int = 0) -> Distribution:
    """Return random distributions, another for each context. Pure.

    Args:
        seed: Seed of the distributions.
        vocab_size: V.
        num_impossible: Tokens of each distribution that have probability 0, as truncation leaves them.
    """

    @functools.cache
    def distribution(path: tuple[int, ...]) -> Float:
        rng = np.random.default_rng([seed, len(path), *path])
        weights = rng.dirichlet(np.full(vocab_size, 0.7)) + 0.01
        weights[rng.permutation(vocab_size)[:num_impossible]] = 0.0
        found: Float = weights / weights.sum()
        return found

    return distribution


def greedy(distribution: Distribution) -> Distribution:
    """Return distributions that give everything to the most likely token. Pure."""
    return lambda path: np.eye(len(distribution(path)))[distribution(path).argmax()]


@attrs.frozen(kw_only=True)
class Cases:
    """All that may be drafted, and sampled, in a scene.

    Attributes:
        tokens: The drafts, ``[B, N]``.
        sampled: Tokens of the ordinary sampler, ``[B, N + 1]``; empty if no rule looks at them.
        weights: Probability of each case, ``[B]``; they sum to 1.
    """

    tokens: Int
    sampled: Int
    weights: Float


@attrs.frozen(kw_only=True)
class Scene:
    """Drafts of one shape.

    Attributes:
        parents: Node before each draft: node 0 is the newest token, node i + 1 draft i.
        target: The model's distributions.
        proposal: The drafter's.
        certain: Drafts without a draw: the most likely tokens of the drafter, one for each certain sibling.
        twins: All certain siblings are one token.
        vocab_size: V.
    """

    parents: tuple[int, ...]
    target: Distribution
    proposal: Distribution
    certain: frozenset[int] = frozenset()
    twins: bool = False
    vocab_size: int = 3

    @property
    def num_drafts(self) -> int:
        """N."""
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """No two drafts stand after one node."""
        return self.parents == tuple(range(self.num_drafts))

    def route(self, node: int) -> tuple[int, ...]:
        """Return the drafts from the newest token to a node, the node's own last."""
        return () if node == 0 else (*self.route(self.parents[node - 1]), node - 1)

    def path(self, tokens: Sequence[int], node: int) -> tuple[int, ...]:
        """Return the tokens of :meth:`route`."""
        return tuple(int(tokens[draft]) for draft in self.route(node))

    def drafted(self, tokens: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield all drafts of positive probability, with it: draft after draft, each after what its siblings have left."""
        if len(tokens) == self.num_drafts:
            yield tokens, 1.0
            return
        for token, chance in enumerate(self._distribution_of_next(tokens)):
            if chance > 0:
                for whole, rest in self.drafted((*tokens, token)):
                    yield whole, float(chance) * rest

    def _distribution_of_next(self, tokens: tuple[int, ...]) -> Float:
        number, node = len(tokens), self.parents[len(tokens)]
        distribution = self.proposal(self.path(tokens, node))
        siblings = [draft for draft in range(number) if self.parents[draft] == node]
        if number in self.certain:
            rank = 0 if self.twins else sum(draft in self.certain for draft in siblings)
            return np.asarray(np.eye(len(distribution))[np.argsort(-distribution, kind="stable")[rank]])
        distribution = distribution.copy()
        distribution[[tokens[draft] for draft in siblings if draft not in self.certain]] = 0.0
        return np.asarray(distribution / distribution.sum())

    def cases(self, *, with_samples: bool) -> Cases:
        """Return all drafts, each with all tokens that the ordinary sampler may choose at its nodes if asked for."""
        drafts, weights = zip(*self.drafted(), strict=True)
        if not with_samples:
            return Cases(
                tokens=np.array(drafts), sampled=np.empty((len(drafts), 0), np.int64), weights=np.array(weights)
            )
        rows = []
        for tokens, weight in zip(drafts, weights, strict=True):
            chances = [self.target(self.path(tokens, node)) for node in range(self.num_drafts + 1)]
            for sampled in itertools.product(*(np.flatnonzero(distribution).tolist() for distribution in chances)):
                chance = np.prod([distribution[token] for distribution, token in zip(chances, sampled, strict=True)])
                rows.append((tokens, sampled, weight * float(chance)))
        found = [np.array(column) for column in zip(*rows, strict=True)]
        return Cases(tokens=found[0], sampled=found[1], weights=found[2])


def verification_of(
    scene: Scene,
    cases: Cases,
    tensor: Callable[[Any], Any],
    *,
    is_linear: bool | None = None,
    single: bool = False,
    num_padding: int = 0,
) -> Verification:
    """Return what a rule is shown of cases. Pure.

    Args:
        scene: Theirs.
        cases: Which.
        tensor: Makes a tensor of an array.
        is_linear: Value of ``is_linear`` that the rule is shown; by default the truth.
        single: Distributions in float32.
        num_padding: Columns of padding after the drafts.
    """
    count, num_drafts = cases.tokens.shape
    target = np.zeros((count, num_drafts + 1 + num_padding, scene.vocab_size))
    proposal = np.zeros((count, num_drafts + num_padding, scene.vocab_size))
    for row, tokens in enumerate(cases.tokens.tolist()):
        for node in range(num_drafts + 1):
            target[row, node] = scene.target(scene.path(tokens, node))
        for draft in set(range(num_drafts)) - scene.certain:
            proposal[row, draft] = scene.proposal(scene.path(tokens, scene.parents[draft]))
    target[:, num_drafts:] = target[:, num_drafts : num_drafts + 1]
    dtype = np.float32 if single else np.float64
    all_certain = len(scene.certain) == num_drafts
    parents = [*scene.parents, *range(num_drafts, num_drafts + num_padding)]
    sampled = np.pad(cases.sampled, ((0, 0), (0, num_padding)), mode="edge") if cases.sampled.size else None
    return Verification(
        tokens=tensor(np.pad(cases.tokens, ((0, 0), (0, num_padding)), constant_values=-1).astype(np.int64)),
        parents=tensor(np.tile(np.array(parents, np.int64), (count, 1))),
        num_drafts=tensor(np.full(count, num_drafts, np.int64)),
        is_linear=scene.is_chain if is_linear is None else is_linear,
        sampled=None if sampled is None else tensor(sampled.astype(np.int64)),
        target=tensor(target.astype(dtype)) if sampled is None else None,
        proposal=None if all_certain else tensor(proposal.astype(dtype)),
    )


@attrs.frozen(kw_only=True)
class Emission:
    """What a rule makes of a scene.

    Attributes:
        distribution: Distribution of the next H tokens, ``[V ** H]``: those of the step, and what the model goes on with. H is the depth of
            the drafts + 1.
        mean_accepted: Mean number of drafts that stand.
    """

    distribution: Float
    mean_accepted: float


def emission(
    rule: AcceptanceRule,
    scene: Scene,
    tensor: Callable[[Any], Any],
    *,
    is_linear: bool | None = None,
    single: bool = False,
) -> Emission:
    """Return the distribution that a rule gives a scene's next tokens, by enumeration.

    Args:
        rule: Asked once for ``accept``, and once for ``last`` at each node if it needs distributions.
        scene: The drafts.
        tensor: Makes a tensor of an array.
        is_linear: See :func:`verification_of`.
        single: The same.
    """
    cases = scene.cases(with_samples=not rule.needs_distributions)
    asked = verification_of(scene, cases, tensor, is_linear=is_linear, single=single)
    stops = _stops(scene, np.asarray(rule.accept(asked).tolist(), np.float64))
    depth = max(len(scene.route(node)) for node in range(scene.num_drafts + 1))
    ends = [np.zeros((scene.vocab_size**length, scene.vocab_size)) for length in range(depth + 1)]
    mean_accepted = 0.0
    for node in range(scene.num_drafts + 1):
        if rule.needs_distributions:
            where = tensor(np.full(len(cases.weights), node, np.int64))
            last = np.asarray(rule.last(asked, where).tolist(), np.float64)
            last /= last.sum(-1, keepdims=True)
        else:
            last = np.eye(scene.vocab_size)[cases.sampled[:, node]]
        route = scene.route(node)
        weight = cases.weights * stops[:, node]
        place = np.zeros(len(weight), np.int64)
        for draft in route:
            place = place * scene.vocab_size + cases.tokens[:, draft]
        np.add.at(ends[len(route)], place, weight[:, None] * last)
        mean_accepted += len(route) * float(weight.sum())
    return Emission(distribution=_continued(scene, ends, np.zeros(1)), mean_accepted=mean_accepted)


def model_distribution(scene: Scene) -> Float:
    """Return the model's own distribution of the next H tokens, ``[V ** H]``. Pure."""
    depth = max(len(scene.route(node)) for node in range(scene.num_drafts + 1))
    return _continued(scene, [np.zeros((1, 1))] * (depth + 1), np.ones(1))


def _stops(scene: Scene, accept: Float) -> Float:
    """Return how likely verification ends at each node, ``[B, N + 1]``."""
    reached = [np.ones(len(accept))]
    left = [np.ones(len(accept)) for _ in range(scene.num_drafts + 1)]
    for draft, parent in enumerate(scene.parents):
        reached.append(reached[parent] * accept[:, draft])
        left[parent] = left[parent] - accept[:, draft]
    return np.stack([arrives * stays for arrives, stays in zip(reached, left, strict=True)], axis=1)


def _continued(scene: Scene, ends: Sequence[Float], distribution: Float) -> Float:
    """Return the distribution of H tokens: texts that end a step at each length, and go on as the model does."""
    for length, ended in enumerate(ends):
        contexts = itertools.product(range(scene.vocab_size), repeat=length)
        target = np.stack([scene.target(path) for path in contexts])
        distribution = (ended + distribution[:, None] * target).ravel()
    return distribution
