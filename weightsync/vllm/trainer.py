"""vLLM's trainer side of weight transfer with a store in the middle, for one engine or a fleet.

    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    sender = WeightTransferTrainerFactory.trainer_init(
        RoseMuxTrainerInitInfo("/srv/weights/job-a", rank=rank),
        client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model))
    sender.send_weights()                                   # after each step

`url`: address of one engine with backend "rosemux", or of a gateway's job, `/v1/jobs/JOB/vllm`,
which stands for all its engines. Importing this module makes the backend known to vLLM's trainer
factory (from vLLM 0.27). Weights go to the store; over the client goes only which version it is.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import checked_name
from weightsync.publish.store_writer import store_name
from weightsync.publisher import Publisher
from weightsync.vllm.plugin import BACKEND


@dataclass
class RoseMuxTrainerInitInfo(TrainerInitInfo):
    """`store_dir`: a directory or an object store, whose last part is its name for engines."""

    backend: ClassVar[str] = BACKEND

    store_dir: str


class RoseMuxTrainer(TrainerWeightTransferEngine[RoseMuxTrainerInitInfo]):
    """One per trainer rank; rank 0 publishes and calls the engines."""

    init_info_cls = RoseMuxTrainerInitInfo

    def __init__(self, init_info: RoseMuxTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._store = checked_name(store_name(init_info.store_dir), what="store")
        self._publisher = Publisher(init_info.store_dir) if init_info.is_sender else None

    @classmethod
    def trainer_init(
        cls, init_info: RoseMuxTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Raises ConfigError without a source, or where the store has a publisher already."""
        if source is None:
            raise ConfigError("backend rosemux: pass the weights as `source`")
        made = cls(init_info, client=client, source=source)
        if made.is_sender:
            client.init_weight_transfer_engine({})
        return made

    def send_weights(self) -> None:
        """Publishes what the source yields, tensor by tensor; returns when the engines hold it.

        Every rank reads the source to its end, because materialising a shard is a collective: where
        the publisher refuses a tensor too, or the other ranks would wait for this one for ever.
        """
        coming = iter(self.source)
        try:
            if self._publisher is None:
                return
            published = self._publisher.publish(coming)
        finally:
            deque(coming, maxlen=0)
        self.client.start_weight_update()
        self.client.update_weights(
            {
                "store": self._store,
                "version": published.version,
                "state_hash": published.state_hash,
            }
        )
        self.client.finish_weight_update(str(published.version))

    def shutdown(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


WeightTransferTrainerFactory.register_engine(BACKEND, RoseMuxTrainer)
