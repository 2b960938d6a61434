"""Mutual proof of a shared secret between the two ends of a connection: of a rank and a rendezvous
store, and of two ranks.

Each end sends a fresh nonce and proves the secret with a keyed digest over both nonces, so a
recorded handshake is worthless, in its own epoch too, and the secret itself never travels. What
follows on the connection is neither encrypted nor signed. Imports no torch.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

NONCE_BYTES = 32
PROOF_BYTES = 32
REFUSED = bytes(PROOF_BYTES)
"""Sent in place of the proof of the accepting end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a rendezvous store and the secret of its epoch. Travels over Ray only."""

    host: str
    port: int
    secret: str = field(default="", repr=False)
    """Secret without which the store refuses the connection."""


def new_secret() -> str:
    return secrets.token_hex(32)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def host_proof(secret: str, *, host_nonce: bytes, rank_nonce: bytes) -> bytes:
    return _digest(secret, b"host", host_nonce + rank_nonce)


def rank_proof(secret: str, *, host_nonce: bytes, rank_nonce: bytes) -> bytes:
    return _digest(secret, b"rank", host_nonce + rank_nonce)


def peer_proof(secret: str, *, group: str, prover: int, verifier: int, nonces: bytes) -> bytes:
    """Returns what one rank of a group sends to another over their connection; `nonces`: the
    verifier's, then the prover's."""
    return _digest(secret, f"{group} rank {prover} to {verifier} ".encode(), nonces)


def proves(proof: bytes, expected: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(proof, expected)


def _digest(secret: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"eesd rendezvous " + role + nonces, hashlib.sha256)
