#!/bin/sh
# Makes each rank a host of its own, with one GPU; as root. A machine with one GPU is enough: hosts share it.
#   mpirun -n 2 sh tests/gpu/hosts.sh python3 -m pytest tests/gpu/test_vectors.py
# With RANKS_PER_HOST=2 two ranks are a host, each with a GPU of its own; hosts share GPUs if there are too few.
# Messages are slow there, so tests have few cases; PBLASMP_TESTS= runs all.
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:?start it with mpirun}}
gpus=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd, -)}
count=$(echo "$gpus" | tr , '\n' | wc -l)
CUDA_VISIBLE_DEVICES=$(echo "$gpus" | cut -d, -f$((rank % count + 1)))
[ "$count" -ge "${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-1}}" ] || export NCCL_MULTI_RANK_GPU_ENABLE=1
host=host$((rank / ${RANKS_PER_HOST:-1}))
export PBLASMP_TESTS="${PBLASMP_TESTS-few}"
export CUDA_VISIBLE_DEVICES NCCL_HOSTID="$host" NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
# shellcheck disable=SC2016 - the inner shell expands it
exec unshare --uts sh -c 'hostname "$0" && exec "$@"' "$host" "$@"
