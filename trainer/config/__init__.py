"""All settings of a run: the config classes, which a config page imports from here."""

from layers.token_choice import TokenChoice
from trainer.config.sections import (
    ChatConfig,
    ChatLoss,
    CheckpointConfig,
    CompilationConfig,
    ContextConfig,
    DataConfig,
    EvaluationConfig,
    LossConfig,
    LossImplementation,
    MeshConfig,
    OptimizerConfig,
    SamplesConfig,
    TensorConfig,
    TooLong,
    WandbConfig,
    WatchdogConfig,
)
from trainer.config.sources import LengthWeight, SourceConfig
from trainer.config.train_config import Phase, RunPhase, TrainConfig

__all__ = [
    "ChatConfig",
    "ChatLoss",
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
    "TooLong",
    "TrainConfig",
    "WandbConfig",
    "WatchdogConfig",
]
