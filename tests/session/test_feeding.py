"""How validation data is shared out, and what a mean over shares is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from determined_ds.sessions.feeding import even_share


@given(samples=st.integers(1, 60), replicas=st.integers(1, 6), size=st.integers(1, 9))
def test_every_sample_is_in_one_share_and_replicas_have_as_many_batches(
    samples: int, replicas: int, size: int
) -> None:
    shares = [even_share(list(range(samples)), replica, replicas, size) for replica in range(replicas)]
    assert len({len(share) for share in shares}) == 1
    assert all(1 <= len(batch) <= size + 1 for share in shares for batch in share)
    found = sorted(sample for share in shares for batch in share for sample in batch)
    if samples >= replicas:
        assert found == list(range(samples))
    else:  # every replica has all of them, so that their mean is that of one
        assert found == sorted(list(range(samples)) * replicas)
