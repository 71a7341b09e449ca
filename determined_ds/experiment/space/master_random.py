"""The numbers that Determined's master draws a search's trials from."""

from __future__ import annotations

import random
import uuid
from typing import NamedTuple

STATE_WORDS = 624
MASK = 2**32 - 1
LARGEST_UNIT = (2**53 - 1) / 2**53
WORDS_OF_A_REQUEST_ID = 4
TRIAL_SEEDS = 2**31


class Created(NamedTuple):
    """What the master draws for a trial beside its hyperparameters.

    Args:
        request_id: Its name within the search, a UUID.
        trial_seed: Its seed, 31 bits.
    """

    request_id: str
    trial_seed: int


class MasterRandom:
    """A Mersenne twister that is seeded and read as the master's.

    Source: ``State`` in determined 0.38.1's ``master/pkg/nprand/nprand.go``, which is NumPy's ``RandomState``.

    Args:
        seed: ``reproducibility.experiment_seed``, 32 bits.
    """

    def __init__(self, seed: int) -> None:
        words, word = [], seed & MASK
        for index in range(STATE_WORDS):
            words.append(word)
            word = (1812433253 * (word ^ (word >> 30)) + index + 1) & MASK
        self._random = random.Random()
        self._random.setstate((3, (*words, STATE_WORDS), None))

    def below(self, count: int) -> int:
        """An integer in [0, count), by drawing bits until they are small enough."""
        largest = count - 1
        bits = largest.bit_length()
        while largest > 0:
            if bits <= 32:
                drawn = self._random.getrandbits(32)
            else:
                drawn = self._random.getrandbits(32) << 32 | self._random.getrandbits(32)
            drawn &= (1 << bits) - 1
            if drawn <= largest:
                return drawn
        return 0

    def uniform(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return uniform(low, high, self._random.random())

    def create(self) -> Created:
        """Draw what the creation of a trial takes after its hyperparameters: a request id, then a seed.

        Source: ``NewCreate`` in determined 0.38.1's ``master/pkg/searcher/actions.go``; ``NewRequestID`` in
        ``master/pkg/model/searcher.go`` there.
        """
        words = [self._random.getrandbits(32) for _ in range(WORDS_OF_A_REQUEST_ID)]
        drawn = b"".join(word.to_bytes(4, "little") for word in words)
        return Created(str(uuid.UUID(bytes=drawn, version=4)), self.below(TRIAL_SEEDS))


def first_trial_seed(experiment_seed: int) -> int:
    """The seed of an experiment's first trial, where all hyperparameters are constants.

    Args:
        experiment_seed: ``reproducibility.experiment_seed``, 32 bits.
    """
    return MasterRandom(experiment_seed).create().trial_seed


def uniform(low: float, high: float, unit: float) -> float:
    """The number that lies at ``unit``, in [0, 1), between two others."""
    return low + (high - low) * unit
