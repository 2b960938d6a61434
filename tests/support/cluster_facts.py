"""A healthy node as preflight reads it, and nodes as Ray lists them."""

from cluster.preflight.nodes import ClusterNode, nodes_of
from cluster.preflight.probe import Interface, NodeFacts

GIB = 2**30
HEALTHY = NodeFacts(
    hostname="worker-1",
    address="10.0.0.11",
    num_cpus=16,
    gpus=("NVIDIA H100, 81559 MiB, 580.1",),
    memory_bytes=64 * GIB,
    shm_bytes=8 * GIB,
    disk_free_bytes=100 * GIB,
    disk_folder="/tmp",
    open_files=1_000_000,
    memlock_bytes=-1,
    python="3.11.7",
    versions=(("torch", "2.13.0+cu130"), ("ray", "2.60.0")),
    nccl="2.28.9",
    ray_auth_mode="token",
    has_ray_token=True,
    nccl_environment=(("NCCL_SOCKET_IFNAME", "eth"),),
    interfaces=(
        Interface(name="lo", is_up=True, speed_mbps=0, mtu=65536, addresses=("127.0.0.1",)),
        Interface(name="eth0", is_up=True, speed_mbps=25000, mtu=9000, addresses=("10.0.0.11",)),
    ),
    has_infiniband=False,
)


def node_entry(address: str, **changes: object) -> dict[str, object]:
    entry: dict[str, object] = {
        "NodeID": f"id of {address}",
        "Alive": True,
        "NodeManagerAddress": address,
        "NodeManagerPort": 6380,
        "ObjectManagerPort": 8076,
        "DashboardAgentListenPort": 52365,
        "Resources": {"CPU": 8.0},
        "Labels": {},
    }
    return entry | changes


def cluster_node(address: str = "10.0.0.1", **changes: object) -> ClusterNode:
    (node,) = nodes_of([node_entry(address, **changes)])
    return node
