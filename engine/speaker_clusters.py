"""How many voices, and which window belongs to which: clustering of unit vectors and smoothing over time.

Pure: numpy arrays in and out. Knows nothing of audio, models or words.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

Array = npt.NDArray[np.float32]
Labels = npt.NDArray[np.intp]

_REFINEMENTS = 4
_FRAGMENT_SIMILARITY = 0.7  # windows are first joined into fragments of one voice for sure
_MOST_FRAGMENTS = 300  # joining them costs the cube of it: half a second
_TYPICAL_WITHIN = 0.72  # how alike two windows of one voice usually are...
_TYPICAL_PAIRS = 10  # ...and how many pairs of its own a group needs to outweigh that
_MOST_CUTS = 64
_CELLS = 20_000  # of a path, walked without a break: 0.1 s


def find_voices(
    vectors: Array,
    *,
    num: int | None = None,
    similarity: float = 0.8,
    min_size: int = 1,
    max_clustered: int = 2000,
    max_voices: int = 32,
) -> Array:
    """Centroids [K, D] (unit length) of the voices among `vectors` [N, D] (unit length); K = 0 for N = 0.

    Average-linkage clustering; two groups are one voice while they are at least `similarity` alike: the mean cosine
    across them over that within them, so that a clean recording (all alike) and a noisy one are measured alike. `num`
    asks for that many instead; without it the `max_voices` largest are kept. Groups of fewer than `min_size` windows
    are noise while there is a larger one. More than `max_clustered` windows are thinned evenly first (the cost is
    quadratic), then all of them refine the centroids.
    """
    count = len(vectors)
    if count == 0:
        return np.zeros(vectors.shape, np.float32)
    sample = vectors
    if count > max_clustered:
        sample = vectors[np.linspace(0, count - 1, max_clustered).round().astype(np.intp)]
    labels = _cut(sample, num, similarity, min_size)
    if num is None:
        labels = np.where(labels < max_voices, labels, -1)
    centroids = _means(sample, labels)
    for _ in range(_REFINEMENTS):
        nearest: Labels = (vectors @ centroids.T).argmax(1)
        kept = np.unique(nearest)
        if len(kept) < len(centroids) and num is not None:
            break  # asked for so many: keep them
        centroids = _means(vectors, nearest)
    return centroids


def _cut(vectors: Array, num: int | None, similarity: float, min_size: int) -> Labels:
    """Labels of the groups, -1 for noise."""
    count = len(vectors)
    if count == 1 or num == 1:
        return np.zeros(count, np.intp)
    distance = np.clip(1.0 - vectors @ vectors.T, 0.0, 2.0)
    np.fill_diagonal(distance, 0.0)
    tree = linkage(squareform(distance, checks=False), "average")
    if num is None:
        fragments = fcluster(tree, 1.0 - _FRAGMENT_SIMILARITY, "distance")
        if fragments.max() > _MOST_FRAGMENTS:
            fragments = fcluster(tree, _MOST_FRAGMENTS, "maxclust")
        return _large(_merged(vectors, fragments, similarity), min_size, 1)
    # An odd window alone is often the last to join: cut deeper until there are `num` branches of some size.
    for parts in range(num, min(count, num + _MOST_CUTS) + 1):
        labels = _large(fcluster(tree, parts, "maxclust"), min_size, num)
        if labels.max() + 1 == num:
            return labels
    return _large(fcluster(tree, num, "maxclust"), 1, num)


def _merged(vectors: Array, labels: npt.NDArray[np.int32], similarity: float) -> npt.NDArray[np.int32]:
    """`labels` after joining the most similar two groups again and again, while they are `similarity` alike."""
    groups, index = np.unique(labels, return_inverse=True)
    sums = np.zeros((len(groups), vectors.shape[1]))
    np.add.at(sums, index, vectors)
    dots = sums @ sums.T  # sums of cosines over all pairs of windows of two groups
    sizes = np.bincount(index).astype(np.float64)
    owner = np.arange(len(groups))
    dead = np.zeros(len(groups), bool)
    for _ in range(len(groups) - 1):
        pairs = sizes * (sizes - 1) / 2
        within = ((dots.diagonal() - sizes) / 2).clip(0) + _TYPICAL_PAIRS * _TYPICAL_WITHIN
        within /= pairs + _TYPICAL_PAIRS
        alike = dots / np.outer(sizes, sizes) / np.sqrt(np.outer(within, within))
        np.fill_diagonal(alike, -1.0)
        alike[dead] = -1.0
        alike[:, dead] = -1.0
        one, other = divmod(int(alike.argmax()), len(groups))
        if alike[one, other] < similarity:
            break
        dots[one] += dots[other]
        dots[:, one] += dots[:, other]
        sizes[one] += sizes[other]
        owner[owner == other] = one
        dead[other] = True
    return owner[index].astype(np.int32)


def _large(labels: npt.NDArray[np.int32], min_size: int, at_least: int) -> Labels:
    """Labels 0.. for the groups of `min_size` members, largest first, and -1 for the rest.

    `at_least` 1: when no group is large enough, the largest is taken. More: exactly that many, or none (all -1).
    """
    groups, sizes = np.unique(labels, return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    kept = [int(groups[index]) for index in order if sizes[index] >= min_size]
    if at_least > 1:
        kept = kept[:at_least] if len(kept) >= at_least else []
    elif not kept:
        kept = [int(groups[order[0]])]
    result = np.full(len(labels), -1, np.intp)
    for new, old in enumerate(kept):
        result[labels == old] = new
    return result


def _means(vectors: Array, labels: Labels) -> Array:
    """Unit means [K, D] of the groups in `labels`, in their order; -1 counts nowhere."""
    groups = [group for group in np.unique(labels) if group >= 0]
    means = np.stack([vectors[labels == group].mean(0) for group in groups])
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    unit: Array = (means / np.maximum(lengths, 1e-9)).astype(np.float32)
    return unit


def best_path(scores: Array, switch_cost: Array) -> Labels:
    """The label of each of T cells: the path with the highest sum of `scores` [T, K] less what its switches cost.

    `switch_cost[t]` is paid where cell t has another label than cell t - 1. Ties go to no switch, then to the lower label.
    """
    walk = walk_best_path(scores, switch_cost)
    while True:
        try:
            next(walk)
        except StopIteration as end:
            path: Labels = end.value
            return path


def walk_best_path(scores: Array, switch_cost: Array) -> Generator[None, None, Labels]:
    """`best_path` as its return value; yields now and then, so that others get their turn."""
    num_cells, num_labels = scores.shape
    if num_labels == 1:
        return np.zeros(num_cells, np.intp)
    came_from = np.empty((num_cells, num_labels), np.int32)
    stay = np.arange(num_labels, dtype=np.int32)
    total = scores[0].astype(np.float64)
    for cell in range(1, num_cells):
        best = int(total.argmax())
        jump = total[best] - switch_cost[cell]
        stays = total >= jump
        came_from[cell] = np.where(stays, stay, best)
        total = np.where(stays, total, jump) + scores[cell]
        if cell % _CELLS == 0:
            yield
    path = np.empty(num_cells, np.intp)
    path[-1] = int(total.argmax())
    for cell in range(num_cells - 1, 0, -1):
        path[cell - 1] = came_from[cell, path[cell]]
    return path
