# SPDX-License-Identifier: Apache-2.0
"""Environment variables of a stage that Ray started.

Upstream sends the server's whole environment to every worker, where it fills what is not set there: a machine's own
value wins.  That is right for what describes a machine, and wrong for the two below.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from vllm.logger import init_logger

logger = init_logger(__name__)

PARTITION = "VLLM_PP_LAYER_PARTITION"
INTERFACE = "GLOO_SOCKET_IFNAME"


def take_partition(environ: MutableMapping[str, str], driver: Mapping[str, str]) -> None:
    """Divide the layers as the server does, whatever the machine says.

    With a value of its own a machine would load other layers than those that the server checked and that the other
    stages leave to it: wrong answers, and no error.

    Args:
        environ: of this worker; changed in place
        driver: the server's
    """
    own, decided = environ.pop(PARTITION, None), driver.get(PARTITION)
    if own not in (None, decided):
        logger.warning(
            "%s=%s of this machine is not used: one division holds for all stages, and the server has %s.",
            PARTITION,
            own,
            decided or "none, which is even stages",
        )
    if decided is not None:
        environ[PARTITION] = decided


def choose_interface(
    environ: MutableMapping[str, str],
    driver: Mapping[str, str],
    address: str,
    interfaces: Mapping[str, Sequence[str]],
) -> None:
    """Let gloo listen where Ray is reachable.

    Gloo takes the address of the host's name, which on Debian and Ubuntu is 127.0.1.1, and the other machines then
    wait for it in vain.  The server's own choice is taken where an interface of that name exists here.

    Args:
        environ: of this worker; changed in place
        driver: the server's
        address: of this machine in the Ray cluster
        interfaces: name -> addresses, of this machine
    """
    if INTERFACE in environ:
        return
    wanted = driver.get(INTERFACE)
    if wanted in interfaces:
        return
    found = next((name for name, addresses in interfaces.items() if address in addresses), None)
    if wanted is not None:
        logger.warning(
            "%s=%s of the server is no interface of this machine, which has %s; %s. Set it before `ray start` here.",
            INTERFACE,
            wanted,
            ", ".join(interfaces),
            f"{found} is used" if found else "it will probably fail",
        )
    if found is not None:
        environ[INTERFACE] = found
