"""The peak of this machine: what a large matrix product reaches, measured without a trace."""

from __future__ import annotations

import time

import torch

from determined_ds.runtime.profiling.peak_flops import peak_flops, peak_flops_by_precision

CPU = torch.device("cpu")


def test_no_matrix_product_is_faster_than_the_peak() -> None:
    left, right = torch.ones(768, 768), torch.ones(768, 768)
    fastest = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        fastest = min(fastest, time.perf_counter() - start)
    reached = 2 * 768**3 / fastest
    # Another process may have had the cores in either measurement.
    assert 0.5 < peak_flops(CPU, "fp32", seconds=0.2) / reached < 20


def test_measuring_draws_no_random_number_and_takes_the_time_it_is_given() -> None:
    torch.manual_seed(3)
    state, start = torch.get_rng_state(), time.perf_counter()
    found = peak_flops_by_precision(CPU, seconds=0.05)
    assert torch.equal(torch.get_rng_state(), state)
    assert time.perf_counter() - start < 20
    assert list(found) == ["fp32", "bf16"]
    assert all(flops > 1e8 for flops in found.values())
