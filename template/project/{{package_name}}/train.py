"""Train what the configuration describes."""

from typing import Any

import hydra
import lightning as L
from hydra.utils import instantiate
from lightning_3d import Layout
from omegaconf import DictConfig


def train(cfg: DictConfig) -> dict[str, Any]:
    """Fit, and return the last metrics."""
    L.seed_everything(cfg.seed, workers=True)
    data: L.LightningDataModule = instantiate(cfg.data)
    module: L.LightningModule = instantiate(cfg.model)
    callbacks = [
        instantiate(callback) for callback in cfg.callbacks.values() if callback is not None
    ]
    loggers = [instantiate(logger) for logger in cfg.logger.values()]
    ranks = Layout.parse(cfg.trainer.strategy.layout).world_size
    devices = cfg.trainer.devices or max(1, ranks // cfg.trainer.num_nodes)
    trainer: L.Trainer = instantiate(
        cfg.trainer, devices=devices, callbacks=callbacks, logger=loggers
    )
    trainer.fit(module, datamodule=data, ckpt_path=cfg.ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if trainer.is_global_zero:
        print(
            ", ".join(f"{name} {value:.6f}" for name, value in sorted(metrics.items())), flush=True
        )
    return metrics


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Return the number that a sweep optimizes."""
    return train(cfg).get(cfg.optimized_metric)


if __name__ == "__main__":
    main()
