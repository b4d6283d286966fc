#!/bin/sh
# Makes hosts of this machine, each with a network, a name and a /dev/shm of its own; as root. Starts MPICH's ranks there,
# a host after the other, between which messages go by TCP:
#   sh tests/mpi/networks.sh 2 4 .venv/bin/python -m pytest tests/mpi/test_vectors.py
# The first number is how many hosts, the second how many ranks.
if [ -n "${PBLASMP_NETWORKS:-}" ]; then # MPICH's launcher calls this in the place of ssh: [-x] ADDRESS COMMAND
  while [ "${1#-}" != "$1" ]; do shift; done
  name=host${1##*.}
  shift
  exec ip netns exec "$PBLASMP_NETWORKS-$name" unshare --uts --mount sh -c "hostname $name; mount -t tmpfs shm /dev/shm; $*"
fi
set -eu
hosts=$1 ranks=$2 here=$(realpath "$0") PBLASMP_NETWORKS=net$$
shift 2
export PBLASMP_NETWORKS
ended() {
  for i in $(seq "$hosts"); do ip netns del "$PBLASMP_NETWORKS-host$i" || true; done
  ip link del "$PBLASMP_NETWORKS" || true
}
trap ended EXIT
ip link add "$PBLASMP_NETWORKS" type bridge
ip addr add 10.213.7.254/24 dev "$PBLASMP_NETWORKS"
ip link set "$PBLASMP_NETWORKS" up
addresses=
for i in $(seq "$hosts"); do
  space=$PBLASMP_NETWORKS-host$i
  ip netns add "$space"
  ip link add "v$$-$i" type veth peer name eth0 netns "$space"
  ip link set "v$$-$i" master "$PBLASMP_NETWORKS" up
  ip -n "$space" addr add "10.213.7.$i/24" dev eth0
  ip -n "$space" link set eth0 up
  ip -n "$space" link set lo up
  addresses=$addresses${addresses:+,}10.213.7.$i
done
export UCX_TLS=tcp,self,posix UCX_NET_DEVICES=eth0
"${MPIEXEC:-$(dirname "$(command -v "$1")")/mpiexec}" -launcher ssh -launcher-exec "$here" -localhost 10.213.7.254 \
  -hosts "$addresses" -ppn 1 -n "$ranks" "$@"
