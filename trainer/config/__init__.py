"""All settings of a run: the config classes, which a config page imports from here."""

from layers.token_choice import TokenChoice
from trainer.config.sources import LengthWeight, SourceConfig
from trainer.config.train_config import (
    CheckpointConfig,
    CompilationConfig,
    ContextConfig,
    DataConfig,
    EvaluationConfig,
    LossConfig,
    LossImplementation,
    MeshConfig,
    OptimizerConfig,
    Phase,
    RunPhase,
    SamplesConfig,
    TensorConfig,
    TrainConfig,
    WandbConfig,
    WatchdogConfig,
)

__all__ = [
    "CheckpointConfig",
    "CompilationConfig",
    "ContextConfig",
    "DataConfig",
    "EvaluationConfig",
    "LengthWeight",
    "LossConfig",
    "LossImplementation",
    "MeshConfig",
    "OptimizerConfig",
    "Phase",
    "RunPhase",
    "SamplesConfig",
    "SourceConfig",
    "TensorConfig",
    "TokenChoice",
    "TrainConfig",
    "WandbConfig",
    "WatchdogConfig",
]
