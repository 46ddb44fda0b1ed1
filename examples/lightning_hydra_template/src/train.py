"""Train what the configuration describes: `python src/train.py`, `python src/train.py
experiment=three_d`."""

from typing import Any

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig


def train(cfg: DictConfig) -> dict[str, Any]:
    """Fit, test the best checkpoint if asked, and return the last metrics."""
    L.seed_everything(cfg.seed, workers=True)
    # its arguments are saved in checkpoints
    datamodule: L.LightningDataModule = instantiate(cfg.data, _convert_="all")
    model: L.LightningModule = instantiate(cfg.model, _convert_="all")
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values()]
    loggers = [instantiate(logger) for logger in cfg.logger.values()]
    trainer: L.Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    trainer.fit(model, datamodule=datamodule, ckpt_path=cfg.ckpt_path)
    metrics = dict(trainer.callback_metrics)
    if cfg.test:
        trainer.test(model, datamodule=datamodule, ckpt_path="best", verbose=False)
        metrics |= trainer.callback_metrics
    if trainer.is_global_zero:
        print(
            ", ".join(f"{name} {value:.6f}" for name, value in sorted(metrics.items())), flush=True
        )
    return metrics


@hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
def main(cfg: DictConfig) -> float | None:
    """Return the metric that a sweep optimizes."""
    value = train(cfg).get(cfg.optimized_metric)
    return None if value is None else float(value)


if __name__ == "__main__":
    main()
