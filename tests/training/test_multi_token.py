"""Multi-token prediction: every layout trains what Transformers' own layers train on one process."""

from typing import Any

import pytest
import torch
from multi_token import (
    expected,
    model_group,
    recipe,
    train_ahead,
)
from parity import differences
from ranks import run_ranks

LIMITS = {"float64": 1e-12, "float32": 1e-6}


def assert_same(layout: str, *, dtype: str = "float64", tied: bool = False, world: int = 2, **strategy: Any) -> None:
    arguments = {"layout": layout, "micro_batch_size": 2, "zero_stage": 0} | strategy
    parts = run_ranks(train_ahead, world, model_group(tie_word_embeddings=tied), recipe(dtype), **arguments, timeout=180)
    run, _ = expected(dtype, tied=tied)
    error, drift = differences(parts, run)
    print(layout, dtype, strategy, error)
    assert drift == 0.0
    assert max(error.loss, error.grad_norm, error.weight) < LIMITS[dtype], error


def test_one_process_trains_the_report_s_equations() -> None:
    assert_same("dp1", world=1)
def test_tp2(): assert_same("tp2", self_check="never")
def test_tp2sp(): assert_same("tp2", self_check="never", sequence_parallel=True)
def test_tp2check(): assert_same("tp2", self_check="always")
def test_ep2(): assert_same("dp2_ep2")
def test_pp2(): assert_same("pp2")
def test_pp2tied(): assert_same("pp2", tied=True)
def test_pp2dp2(): assert_same("pp2_dp2", dtype="float32", world=4, zero_stage=1)
