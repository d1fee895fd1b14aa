"""Run by test_dealing.py in a process of its own, which has 8 CPU devices: evaluates dealt batches, prints JSON."""

from __future__ import annotations

import dataclasses
import json
import sys

from kernels import CausalMask, LocalMask
from layers import GPTConfig
from trainer.config import CompilationConfig, ContextConfig, DataConfig, EvaluationConfig, MeshConfig, TrainConfig
from trainer.loop.evaluator import evaluate
from trainer.train import prepare

MODEL = GPTConfig(
    vocab_size=260,
    num_layers=2,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=32,
    masks=(CausalMask() & LocalMask(31, 0), CausalMask()),
    implementation="reference",
    compute_dtype="float32",
    remat="none",
)
RUNS = {
    "one device": (MeshConfig(), ContextConfig()),
    "zigzag": (MeshConfig(data=2, context=4), ContextConfig(deal="zigzag")),
    "by_cost": (MeshConfig(fsdp=2, context=4), ContextConfig(deal="by_cost")),
}


def main(folder: str) -> None:
    base = TrainConfig(
        "dealt",
        MODEL,
        num_steps=200,
        sequence_length=128,
        batch_size=2,
        data=DataConfig(
            source="text", files=(f"{folder}/*.txt",), validation_fraction=0.3, token_cache_dir=f"{folder}/tokens"
        ),
        evaluation=EvaluationConfig(num_sequences=3),  # fills one batch and half of another
        compilation=CompilationConfig(cache_dir=""),
    )
    report = {}
    for name, (mesh, context) in RUNS.items():
        setup = prepare(dataclasses.replace(base, mesh=mesh, context=context), lambda line: None)
        params, eval_step = setup.functions.init_state().params, setup.functions.eval_step
        training = [setup.put(next(setup.batches)) for _ in range(3)]
        setup.batches.close()
        report[name] = [
            dataclasses.asdict(evaluate(eval_step, params, batches, None))
            for batches in (setup.validation_batches, training)
        ] + ["places" in training[0]]
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
