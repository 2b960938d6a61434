"""Request routing in Serve: to the replica that a call names, else by Serve's own choice.

Callers of a pipeline name a replica in the call's `target`. The call goes to that replica if it
exists, and otherwise to the less busy of two drawn at random. Serve pickles the class together with
its module and builds it in every process with a handle, so this module contains nothing else.
"""

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class NamedReplicaRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Request router of the deployment of pipelines, set by `serve_app.app`."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns groups of candidates; the next one is tried if none of the last one answers."""
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [two]
        # Without it Serve retries at once and for ever while no replica answers. It stays set.
        is_first_try = not pending_request.routing_context.should_backoff
        pending_request.routing_context.should_backoff = True
        target = pending_request.kwargs.get("target")
        named = [r for r in candidate_replicas if r.replica_id.unique_id == target]
        if is_first_try:
            for replica in named:
                self._trust(replica)
        return [named, two] if named else [two]

    def _trust(self, replica: RunningReplica) -> None:
        """Marks a replica as having room: Serve would ask it first, which costs a round trip.

        The pipeline's queue is the only bound, and a dead replica is noticed by the failed call. A
        replica that could not be reached has to answer before the call is sent to it again.
        """
        if self.replica_queue_len_cache.get(replica.replica_id) is None:
            self.replica_queue_len_cache.update(replica.replica_id, 0)
