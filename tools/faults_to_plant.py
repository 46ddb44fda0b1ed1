"""The faults that `tools/planted_faults.py` plants: mistakes that a tired engineer or a bad merge
makes, most of them silent.

Each replaces one short piece of code. `old` stands exactly once below `place`, whatever the white
space, so that a file may be reformatted, renamed or split. `python tools/planted_faults.py --check`
says which faults no longer fit the code; a default test runs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One mistake, and the tests that should find it.

    Attributes:
        name: area and mistake, joined by hyphens.
        what: what is wrong, and what a user would get.
        place: file or folder, relative to `lightning_3d/`.
        old: code that is replaced. new: code that replaces it, in the indentation of the first line
            of `old`.
        tests: default tests that are likely to find it, cheapest first: node ids or files, relative
            to `tests/`.
        full: tests marked `full` that are tried when no default test finds it.
    """

    name: str
    what: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]
    full: tuple[str, ...] = ()


_TP_PARITY = (
    "parallel/tensor/test_tensor_parallel.py::test_loss_logits_and_every_gradient_equal_one_process"
)
_ZERO_0 = "parallel/zero/test_zero.py::test_stage_0_in_double_precision"
_ZERO_SHARDED = "parallel/zero/test_zero.py::test_sharded_in_single_precision"
_PIPELINE = "parallel/pipeline/test_pipeline.py::test_gradients_equal_one_process"
_RING = (
    "parallel/context/test_ring_attention.py::test_values_and_gradients_are_those_of_full_attention"
)

TENSOR = (
    Fault(
        "tp-forward-not-summed",
        "The all-reduce after a row-parallel layer is missing: every rank goes on with its part of"
        " the sum.",
        "parallel/tensor/collectives.py",
        "all_reduce_flat(x, group) ctx.mark_dirty(x)",
        "ctx.mark_dirty(x)",
        ("parallel/tensor/test_tensor_parallel_collectives.py", _TP_PARITY),
    ),
    Fault(
        "tp-backward-not-summed",
        "The all-reduce of the input's gradient of column-parallel layers is missing: what lies"
        " before them gets a part of its gradient.",
        "parallel/tensor/collectives.py",
        "all_reduce_flat(gradient, ctx.group)",
        "pass",
        (_TP_PARITY,),
    ),
    Fault(
        "tp-packed-parts-swapped",
        "The second part of a packed matrix (up of gate and up) is cut from where the first part"
        " lies.",
        "parallel/tensor",
        "pieces.append((start + offset, length))",
        "pieces.append((offset, length))",
        (
            "models/test_plans.py::test_shards_tile_every_parameter_exactly",
            "parallel/tensor/test_tensor_parallel.py::test_packed_styles_cut_each_part_by_itself",
        ),
    ),
    Fault(
        "tp-vocabulary-loss-not-summed",
        "The sums of exponentials of a vocabulary-parallel loss are not reduced: each rank"
        " normalizes over its own columns.",
        "parallel/tensor/cross_entropy.py",
        "all_reduce_flat(sums, group)",
        "pass",
        ("parallel/tensor/test_vocab_parallel.py",),
    ),
    Fault(
        "sp-input-gradient-not-summed",
        "Sequence parallelism deals the gradient of a gathered input without summing it over the"
        " ranks.",
        "parallel/tensor/sequence_parallel.py",
        "return scatter_tokens(gradient, ctx.context.group), None",
        "return part_of_tokens(gradient, ctx.context.group), None",
        (
            "parallel/tensor/test_sequence_parallel.py::test_loss_logits_and_every_gradient_equal_one_process",
        ),
    ),
    Fault(
        "tp-replicated-gradients-not-summed",
        "Gradients that each tensor-parallel rank knows in part (norms) are not summed: copies"
        " drift apart.",
        "parallel/zero",
        "in self._partial.get(wave, ())",
        "in self._partial.get(wave + 1, ())",
        (_ZERO_0,),
    ),
    Fault(
        "tp-adapter-gradients-not-summed",
        "The matrix of a LoRA adapter that every rank holds whole is not marked as having a partial"
        " gradient.",
        "parallel/tensor/rewrite.py",
        "return replicated(name, shape, tp_size, grad_sum=True)",
        "return replicated(name, shape, tp_size)",
        (
            "parallel/tensor/test_lora.py::test_a_block_costs_as_many_collectives_as_without_adapters",
            "parallel/tensor/test_lora.py::test_families",
        ),
    ),
)

PIPELINE = (
    Fault(
        "pp-tied-copies-not-summed",
        "An embedding that is tied to the output head on another stage is trained by the gradient"
        " of one of its two uses.",
        "parallel/zero",
        "self._partial.reduce_tied()",
        "pass",
        (_ZERO_0,),
    ),
    Fault(
        "pp-warm-up-off-by-one",
        "1F1B starts one forward too many on each rank: right numbers, one more micro-batch in"
        " memory.",
        "layout/pipeline_orders.py",
        "pp - 1 - rank, micro_batches",
        "pp - rank, micro_batches",
        ("layout/test_planner_orders.py",),
    ),
    Fault(
        "pp-wrong-first-micro-batch",
        "The first stage runs micro-batch 1 in the place of micro-batch 0 when it finds out the"
        " shape of the hidden states.",
        "parallel/pipeline/engine.py",
        "None, step, micro_batch=0",
        "None, step, micro_batch=1",
        (_PIPELINE,),
    ),
    Fault(
        "pp-last-gradient-lost",
        "The gradients of a stage are reduced before its last micro-batch has added to them.",
        "parallel/pipeline/engine.py",
        "last=self._to_come[chunk.stage] == 0",
        "last=self._to_come[chunk.stage] == 1",
        (
            "strategy/test_short_batches.py",
            "strategy/test_accumulation.py",
            "strategy/test_parity.py",
        ),
    ),
    Fault(
        "pp-recompute-with-other-dropout",
        "Before a backward the random state of its micro-batch is not set: recomputed blocks draw"
        " the dropout of another one.",
        "parallel/pipeline/engine.py",
        "step.enter(action.micro_batch)",
        "pass",
        ("parallel/blocks/test_blocks.py::test_the_same_dropout_is_drawn_again",),
    ),
)

_HOST = "parallel/test_host_channel.py"

SHARED_MEMORY = (
    Fault(
        "shared-memory-used-before-it-is-read",
        "A rank writes its next message into memory that others have not read yet: they compute"
        " with the later one.",
        "parallel/host_memory.py",
        "return all(self.flags[rank] for rank in self.readers)",
        "return True",
        (f"{_HOST}::test_a_sender_waits_for_nobody_and_messages_keep_their_order", _HOST),
    ),
    Fault(
        "shared-memory-sum-into-its-own-term",
        "A sum over more than two ranks is written over the term of this rank before that is"
        " added.",
        "parallel/host_channel.py",
        "if index >= self._me else",
        "if index >= 1 else",
        (f"{_HOST}::test_reduce_broadcast_and_exchange_of_rows", _HOST),
    ),
    Fault(
        "shared-memory-late-messages-lost",
        "What a full socket held back is lost when a rank ends: the ranks that wait for it report"
        " that it has disappeared.",
        "parallel/host_memory.py",
        "atexit.register(self.close)",
        "pass",
        (f"{_HOST}::test_a_process_that_exits_sends_what_a_full_socket_held_back",),
    ),
)

CONTEXT_AND_EXPERTS = (
    Fault(
        "cp-parts-not-weighted",
        "Ring attention adds the result of the next keys without the weight of their log-sum-exp.",
        "parallel/context/kernels.py",
        "add_(out * (lse - level).exp_().unsqueeze(-1))",
        "add_(out)",
        (_RING,),
    ),
    Fault(
        "cp-zigzag-uneven",
        "The late chunks of a sequence are dealt in rising order: right numbers, but the last rank"
        " does the most work.",
        "parallel/context/zigzag.py",
        "(2 * size - 1 - rank) * chunk, rank * chunk",
        "(size + rank) * chunk, rank * chunk",
        ("parallel/context/test_ring_attention.py::test_ranks_compute_equally_many_scores",),
    ),
    Fault(
        "cp-ulysses-axes-swapped",
        "Ulysses deals every cp-th head to a rank, and puts them back as if it had dealt"
        " neighbours.",
        "parallel/context/collectives.py",
        "x.view(batch, context.size, heads // context.size, part, width).permute(1, 3, 0, 2, 4)",
        "x.view(batch, heads // context.size, context.size, part, width).permute(2, 3, 0, 1, 4)",
        (_RING,),
    ),
    Fault(
        "ep-results-in-another-order",
        "What experts return is put back by the order in which tokens were sent, not by its"
        " inverse.",
        "parallel/expert/shipment.py",
        "returned[place]",
        "returned[order]",
        (
            "parallel/expert/test_expert_dispatch.py::test_the_output_and_all_gradients_are_those_of_one_process",
        ),
    ),
    Fault(
        "ep-experts-of-the-first-node",
        "A rank that receives tokens from other nodes takes its experts for those of the first"
        " node.",
        "parallel/expert/nodes.py",
        "local = chosen - self._nodes.node * self._per_node",
        "local = chosen",
        (
            "parallel/expert/test_expert_dispatch.py::test_the_output_and_all_gradients_are_those_of_one_process",
        ),
    ),
    Fault(
        "ep-shared-expert-after-the-exchange",
        "The exchange of tokens starts only when the experts are called, so that nothing runs"
        " meanwhile.",
        "parallel/expert/overlap.py",
        "begin(*args, **kwargs)",
        "pass",
        (
            "parallel/expert/test_expert_overlap.py::test_the_shared_expert_runs_between_start_and_end_of_the_exchange",
        ),
    ),
    Fault(
        "ep-balancing-loss-of-every-layer",
        "The loss of the routers is summed over layers, where it is the mean over layers.",
        "parallel/expert/routers.py",
        "factor = weight / len(self.names)",
        "factor = weight",
        ("parallel/expert/test_routers.py",),
    ),
    Fault(
        "context-behind-the-wrong-chunk",
        "Multi-token prediction reads behind each chunk of a rank the first tokens of that chunk"
        " itself, not of the next one.",
        "parallel/context/following.py",
        "found = edges[:, start + edge : start + edge + most]",
        "found = edges[:, start : start + most]",
        ("parallel/context/test_following.py",),
    ),
)

ZERO = (
    Fault(
        "zero-last-buckets-lost",
        "Buckets of gradients that are still on their way when a step ends are not added.",
        "parallel/zero/reduction.py",
        "self._receive_all() parameters",
        "parameters",
        (_ZERO_SHARDED,),
    ),
    Fault(
        "zero-stale-parameters",
        "Stage 3 always gathers the parameters as they were before the first step: the optimizer"
        " trains another copy of them.",
        "parallel/zero",
        "unit.pieces[slot.parameter] = piece",
        "pass",
        (_ZERO_SHARDED,),
    ),
    Fault(
        "zero-partition-of-another-group",
        "A rank takes its part of the gradients at the offset of the first parameter group,"
        " whichever group it is.",
        "parallel/zero/deepspeed_engine.py",
        "return self.base + self._start, self.base + self._stop",
        "return self._start, self._stop",
        (_ZERO_SHARDED,),
    ),
    Fault(
        "zero-experts-of-one-shard-group",
        "Gradients of experts are summed in each shard group, and not over its replicas.",
        "parallel/zero/__init__.py",
        "replicas=self._replicas(trained), scattered",
        "replicas=None if partitions[0].experts else self._replicas(trained), scattered",
        ("parallel/zero/test_shard_groups.py::test_experts_that_ranks_share_out",),
    ),
    Fault(
        "zero-copies-drift-apart",
        "On GPUs, copies of a parameter on tensor-parallel ranks keep their own gradients, and"
        " drift apart by rounding.",
        "parallel/zero/backend.py",
        "if training.copies:",
        "if not training:",
        ("strategy/test_noisy_replicas.py",),
    ),
    Fault(
        "zero-replicas-of-the-first-micro-batch",
        "Gradients that are reduced in every micro-batch are summed over the replicas of a shard"
        " after the first one only.",
        "parallel/zero/reduction.py",
        "is_last = not self.each_micro_batch or bucket.stage in self._last",
        "is_last = True",
        (
            "parallel/zero/test_early_waves.py::test_a_shard_is_summed_over_its_replicas_inside_the_last_backward",
        ),
    ),
    Fault(
        "norm-of-one-stage",
        "The gradient norm is not summed over pipeline stages, so that each stage clips by another"
        " number.",
        "parallel/zero/stepper.py",
        'group("tp", "cp", "pp") if',
        'group("tp", "cp") if',
        (_ZERO_0,),
    ),
)

STEP = (
    Fault(
        "step-divided-by-its-last-batch",
        "With gradient accumulation the gradients are divided by the tokens of the last batch, not"
        " of all batches of the step.",
        "engine/step",
        "scaled = scaled + self._accumulated[1]",
        "pass",
        ("strategy/test_accumulation.py", "strategy/test_short_batches.py"),
    ),
    Fault(
        "step-counts-further-targets",
        "The targets of multi-token prediction count in the weight of a micro-batch, as if the"
        " model itself had predicted them.",
        "engine/step/loss_weights.py",
        "if further:\n            assert",
        "if further:\n            self._weights.count_tokens(tokens)\n            assert",
        ("training/test_multi_token.py::test_a_layout_trains_what_one_process_trains",),
    ),
    Fault(
        "step-weighted-by-rows",
        "Micro-batches weigh as many rows as they have, whatever the number of their target"
        " tokens.",
        "engine/step/loss_weights.py",
        "self._weights.count_tokens(tokens)",
        "pass",
        ("strategy/test_short_batches.py",),
    ),
    Fault(
        "step-fillers-count",
        "Copies of a micro-batch that only fill up the schedule of a short batch are trained on.",
        "engine/step/runner.py",
        "weight = torch.zeros_like(weight)",
        "pass",
        ("strategy/test_short_batches.py",),
    ),
    Fault(
        "step-skip-looks-at-one",
        "A step is taken when either its loss or its gradient norm is finite, not only when both"
        " are.",
        "engine/nonfinite.py",
        "isfinite(norm) and (",
        "isfinite(norm) or (",
        (
            "strategy/test_nonfinite.py::test_the_losses_of_all_batches_of_a_step_count",
            "strategy/test_nonfinite.py",
        ),
    ),
    Fault(
        "step-skip-on-device-by-norm-alone",
        "A fused optimizer skips a step by its gradient norm alone, so that the host stops a run"
        " that has changed weights.",
        "engine/optimizer_step.py",
        "~(computed.finite & norm.isfinite())",
        "~norm.isfinite()",
        ("strategy/test_host_reads.py::test_the_device_looks_at_loss_and_norm",),
    ),
    Fault(
        "step-judged-by-its-last-batch",
        "With gradient accumulation only the loss of the last batch is judged: the host goes on"
        " with a step that the device has skipped.",
        "engine/optimizer_step.py",
        "for batch in self._batches:\n            loss",
        "for batch in self._batches[-1:]:\n            loss",
        ("strategy/test_host_reads.py::test_the_device_looks_at_loss_and_norm",),
    ),
    Fault(
        "step-mask-written-but-remembered",
        "The host answers a question about a mask from the copy of the batch after the step has"
        " written to the mask: padding counts.",
        "engine/step/known_values.py",
        "known.values if known.writes == tensor._version else None",
        "known.values",
        ("strategy/test_known_values.py::test_what_has_changed_is_read",),
    ),
    Fault(
        "seed-dropout-not-synchronized",
        "Tensor-parallel ranks draw different dropout for what they hold alike: their copies drift"
        " apart.",
        "parallel/random_streams.py",
        "if self.deals_sequence and index >= 0 else _ALL_RANKS",
        "if index >= 0 else _ALL_RANKS",
        ("parallel/test_dropout.py::test_replicated_streams_do_not_depend_on_the_rank",),
    ),
    Fault(
        "dropout-compiled-without-its-streams",
        "A compiled block goes on with the numbers of its beginning where a region starts: ranks"
        " drop the same of different heads.",
        "compat/torch_random.py",
        "self.state = result if func is self._restart else self.state",
        "self.state = self.state",
        ("parallel/blocks/test_compiled_dropout.py::test_whatever_a_compiled_block_draws",),
    ),
    Fault(
        "dropout-compiled-from-one-state",
        "A compiled block leaves the generator where it found it: what is drawn after it, or behind"
        " a graph break, repeats its numbers.",
        "compat/torch_random.py",
        "            generator.set_state(after)\n",
        "",
        ("parallel/blocks/test_compiled_dropout.py::test_whatever_a_compiled_block_draws",),
    ),
    Fault(
        "seed-of-weights-differs-between-processes",
        "Initial weights are drawn from Python's hash of their names, which is another number in"
        " every interpreter.",
        "weights",
        'int.from_bytes(blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")',
        'hash(f"{seed}:{name}") % 2**64',
        ("weights/test_initialization.py::test_seeds_are_the_same_on_every_machine",),
    ),
    Fault(
        "data-resumed-at-another-sample",
        "A resumed epoch leaves out as many samples on each data-parallel rank as all of them have"
        " read together.",
        "app/training/data/loaders.py",
        "range(self.total_size), used // self.num_replicas",
        "range(self.total_size), used",
        ("training/test_data.py::test_a_resumed_epoch_goes_on_where_it_was",),
    ),
)

CHECKPOINTS = (
    Fault(
        "checkpoint-optimizer-state-lost",
        "A resumed run begins with the moments of the optimizer at zero.",
        "checkpoint/state.py",
        "folder.read_into(targets)",
        "pass",
        (
            "checkpoint/test_checkpoint.py::test_resuming_on_the_same_layout_is_exact",
            "checkpoint/test_checkpoint_resume.py",
        ),
    ),
    Fault(
        "checkpoint-random-state-lost",
        "A resumed run does not put torch's random number generator where it was.",
        "checkpoint/rng_state.py",
        'torch.set_rng_state(_tensor(state["torch"]))',
        "pass",
        ("checkpoint/test_checkpoint_resume.py",),
    ),
    Fault(
        "checkpoint-columns-of-the-first-rank",
        "A rank that holds some columns of a matrix reads the first columns of it.",
        "checkpoint/reading.py",
        "block.narrow(dim, at[dim], target.shape[dim])",
        "block.narrow(dim, 0, target.shape[dim])",
        (
            "checkpoint/test_checkpoint.py::test_bf16_resumes_with_its_master_weights",
            "checkpoint/test_checkpoint_matrix.py",
        ),
    ),
    Fault(
        "checkpoint-hash-not-compared",
        "Damaged files of the right size are loaded.",
        "checkpoint/hashes.py",
        "if found.sha256 != files[name].sha256:",
        "if found.bytes != files[name].bytes:",
        ("checkpoint/test_checkpoint_damage.py::test_f30_one_flipped_bit_is_found",),
    ),
    Fault(
        "checkpoint-removed-before-it-is-replaced",
        "A checkpoint that is saved again is removed before the new one has its name: a kill in"
        " between leaves none.",
        "checkpoint/folder.py",
        "elif not _exchange(folder, path): path.rename(aside(path, REPLACED)) folder.rename(path)",
        "else: _delete(path); folder.rename(path)",
        (
            "checkpoint/test_checkpoint_damage.py::test_f27_a_kill_leaves_the_newest_complete_checkpoint",
        ),
    ),
)

AROUND_TRAINING = (
    Fault(
        "self-check-without-gradients",
        "The self-check compares outputs only: a plan that forgets a partial gradient trains in"
        " silence.",
        "engine/self_check/check.py",
        "for found in (outputs, gradients)",
        "for found in (outputs,)",
        (
            "strategy/test_self_check.py::test_a_mistake_is_one_message",
            "strategy/test_self_check.py",
        ),
    ),
    Fault(
        "self-check-without-modules-ahead",
        "The self-check leaves out the modules of multi-token prediction: what a layout changes in"
        " them alone is trained in silence.",
        "engine/self_check/check.py",
        "copied.returns_mtp_logits = True",
        "copied.returns_mtp_logits = False",
        ("training/test_multi_token.py::test_the_self_check_compares_the_modules",),
    ),
    Fault(
        "planner-optimizer-not-sharded",
        "The planner counts the optimizer state of ZeRO stage 1 as if every rank held all of it.",
        "app/planner/stage_memory.py",
        "job.zero >= 1",
        "job.zero >= 2",
        ("planner/test_planner.py::test_memory_of_zero_is_the_published_one",),
    ),
    Fault(
        "refusal-with-exit-code-1",
        "A mistake of the user ends a command as a failure of the program does.",
        "app/cli/options.py",
        "return error.exit_code",
        "return 1",
        ("cli/test_plan_command.py", "config/test_refusals.py"),
    ),
    Fault(
        "lock-not-taken",
        "The lock of a folder is not taken: two runs may write checkpoints into one folder.",
        "storage/lock.py",
        "self._lock.acquire(blocking=False)",
        "pass",
        ("checkpoint/test_checkpoint_damage.py::test_f37_two_runs_cannot_write_to_one_folder",),
    ),
    Fault(
        "score-without-the-last-token",
        "Scores of texts leave out their last token: answers of one token all score 0, and"
        " benchmarks are wrong in silence.",
        "app/evaluation/engine.py",
        "targets[row, len(tokens) - 1 - scored : len(tokens) - 1] = torch.tensor(tokens[len(tokens)"
        " - scored :])",
        "targets[row, len(tokens) - 1 - scored : len(tokens) - 2] = torch.tensor(tokens[len(tokens)"
        " - scored : -1])",
        ("evaluation/test_evaluate.py::test_scores_equal_log_probabilities_on_one_process",),
    ),
    Fault(
        "fork-while-a-thread-reads",
        "A process is forked while a thread reads a URL: it inherits a lock of a library that"
        " nobody releases, and a loader of data hangs.",
        "storage/fork_gate.py",
        "self._changed.wait_for(lambda: not self._inside.keys() - {own}, self.longest)",
        "pass",
        (
            "storage/test_fork_gate.py::test_a_reader_of_pieces_that_is_forked_while_a_thread_fetches_one",
            "storage/test_fork_gate.py",
        ),
    ),
    Fault(
        "sweep-keeps-failed-jobs",
        "A sweep that is started again takes jobs that have failed for finished ones.",
        "app/runs/sweep/folder.py",
        "status.status != FINISHED",
        "status.status == RUNNING",
        ("runs/test_sweep.py::test_job_that_left_another_status_than_finished_is_run_again",),
    ),
    Fault(
        "failure-of-a-peer-not-recognized",
        "A rank that lost a peer reports that as the cause, and hides the error of the rank that"
        " failed.",
        "ranks/failure.py",
        "seen = seen.__cause__ or seen.__context__",
        "seen = None",
        ("ranks/test_failures.py::test_lost_peers_are_recognized_through_what_they_caused",),
    ),
    Fault(
        "report-bubble-of-the-last-rank",
        "The idle share of a pipeline counts from when its last rank began to work.",
        "tracing/trace.py",
        "min(each.first for each in batch)",
        "max(each.first for each in batch)",
        ("tracing/test_tracing.py::test_bubble_of_two_stages_by_hand",),
    ),
)

FAULTS = (
    *TENSOR,
    *PIPELINE,
    *SHARED_MEMORY,
    *CONTEXT_AND_EXPERTS,
    *ZERO,
    *STEP,
    *CHECKPOINTS,
    *AROUND_TRAINING,
)
