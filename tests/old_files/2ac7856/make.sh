#!/bin/bash
# Makes the files of this folder, with the code of commit 2ac7856, in /tmp/run, so that nothing in them names a machine.
#     PYTHON=/path/to/python bash make.sh      with a Python that has the dependencies, but not lightning_3d itself
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
rm -rf /tmp/run && mkdir -p /tmp/run/src
(cd "$here/../../.." && git archive 2ac7856) | tar -x -C /tmp/run/src
cp "$here"/make_corpus.py "$here"/script.py "$here"/collect.py /tmp/run
cd /tmp/run
export PYTHONPATH=/tmp/run/src PYTHONDONTWRITEBYTECODE=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
$PYTHON -c 'import lightning_3d; assert lightning_3d.__file__ == "/tmp/run/src/lightning_3d/__init__.py", lightning_3d.__file__'
command="$PYTHON -m lightning_3d"
$PYTHON make_corpus.py

data="data=tokens data.train_path=/tmp/run/corpus.bin data.val_fraction=0.1 data.sequence_length=16 data.global_batch_size=8
  data.val_sequences=8 data.num_workers=0"
tiny="model.config.vocab_size=32 model.config.hidden_size=8 model.config.intermediate_size=16 model.config.num_attention_heads=4
  model.config.num_key_value_heads=2 model.config.max_position_embeddings=16 model.config.bos_token_id=31 model.config.eos_token_id=31"

# run: SIGTERM after the third step, so that a few steps later a checkpoint is saved; whole: the same to its end
llama="$data $tiny model.config.head_dim=2 parallelism=tp2_pp2_dp2 trainer.max_steps=20 trainer.log_every_n_steps=1
  optimizer.scheduler.warmup_steps=4"
$PYTHON src/train.py $llama hydra.run.dir=/tmp/run/whole
$PYTHON src/train.py $llama hydra.run.dir=/tmp/run/run & pid=$!
until [ "$(cat run/metrics.csv 2> /dev/null | wc -l)" -ge 4 ]; do sleep 0.05; done
kill -TERM $pid
wait $pid || [ $? -eq 143 ]
[ ! -e run/checkpoints/step_20.ckpt ] # else the machine was too busy: once more

# sweep: two finished jobs; sweep_whole: its first job goes on to step 8
mixtral="$data $tiny model=mixtral_tiny model.config.num_hidden_layers=2 model.config.num_local_experts=4 precision=bf16
  trainer.log_every_n_steps=2 trainer.trace_every_n_steps=2 optimizer.scheduler.warmup_steps=2 optimizer.scheduler.decay_steps=8"
$PYTHON src/train.py -m $mixtral trainer.max_steps=4 parallelism=dp2_ep2,pp2 hydra.sweep.dir=/tmp/run/sweep
cp -r sweep sweep_whole
$PYTHON src/train.py $mixtral trainer.max_steps=8 parallelism=dp2_ep2 hydra.run.dir=/tmp/run/sweep_whole/0 trainer.auto_resume=true

# script: a Trainer of its own with ZeRO stage 3; plain: one process without the strategy, and its checkpoint converted
$PYTHON script.py /tmp/run/script
$PYTHON script.py /tmp/run/plain plain
$command import plain/step_5.ckpt --output converted.ckpt
$command export "$(echo run/checkpoints/*.ckpt)" --output exported

$PYTHON collect.py > "$here/numbers.json"
cp corpus.bin corpus.json "$here"
# What is made again from the rest, or is not read, is left out; so is the name of this machine.
rm -rf {run,sweep/0,sweep/1}/{report.html,logs,.lock} sweep/{sweep.html,.sweep_lock} sweep/1/checkpoints script/step_1*.ckpt script/losses.json
sed -i "s/\b$(hostname)\b/node0/g" run/status.json sweep/*/status.json sweep/*/timeline.json
for name in run sweep script converted.ckpt exported; do
  tar -c --sort=name --owner=user:0 --group=user:0 --mtime=@0 "$name" | xz -9e > "$here/$name.tar.xz"
done
