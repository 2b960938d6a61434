"""Serve's part of routing: the replica that a call names, else Serve's own way of choosing.

Whoever calls a pipeline has made up its mind and names a replica in the call's `target`. This class
obeys when that replica is there, and takes the less busy of two drawn at random when it is not.
Serve pickles the class together with its module and builds it in every process that holds a handle,
so nothing else stands here.
"""

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class NamedReplicaRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Given to the deployment of pipelines by `serve_app.app`."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of candidates: the next one is tried when nobody of the last one answers."""
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [two]
        # Else Serve asks again at once and for ever while nobody answers. Once set, it stays.
        is_first_try = not pending_request.routing_context.should_backoff
        pending_request.routing_context.should_backoff = True
        target = pending_request.kwargs.get("target")
        named = [r for r in candidate_replicas if r.replica_id.unique_id == target]
        if is_first_try:
            for replica in named:
                self._trust(replica)
        return [named, two] if named else [two]

    def _trust(self, replica: RunningReplica) -> None:
        """Takes it to have room: Serve would ask it first, one round trip in the way of a token.

        A pipeline's own queue is the one bound, and a replica that has died says so by itself. One
        that was not to be reached has to answer before it is sent the call again.
        """
        if self.replica_queue_len_cache.get(replica.replica_id) is None:
            self.replica_queue_len_cache.update(replica.replica_id, 0)
