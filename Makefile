# The few things one does with this repository. Each target installs what it needs first.
# Settings: SEEDS (sim), CYCLES (kill9), ROUNDS (guest-lab), MINUTES (fuzz), LAB_ARGS (lab), BENCH_ARGS (bench, bench-vm).
SEEDS ?= 1000000
CYCLES ?= 300
ROUNDS ?= 12
MINUTES ?= 10
LAB_ARGS ?=
BENCH_ARGS ?=

.PHONY: help run build test sim kill9 guest-lab nfs-lab storage-vm-lab remote-lab ceph-lab docs-lab fuzz lab bench bench-vm deb dist package-lab health-lab

help:
	@echo "make run                 demo: a cached virtual disk, cold and warm, and how to attach it"
	@echo "make build               the release binary, target/release/hearth"
	@echo "make deb                 Debian packages in target/deb (docs/install.md)"
	@echo "make dist                a tarball for other distributions, and what an RPM is made of, in target/dist"
	@echo "make test                every check, at most 25 minutes"
	@echo "make sim SEEDS=1000000   long deterministic simulation"
	@echo "make kill9 CYCLES=300    long kill -9 loop under a verified write load"
	@echo "make guest-lab ROUNDS=12 long tests with emulated guests: power cuts, restarts, resize"
	@echo "make nfs-lab             fsx on a datastore through a guest's kernel while the daemon is killed (OPERATIONS, LAB_PROGRAMS, LAB_WORK)"
	@echo "make storage-vm-lab      a datastore end to end, on two modelled hard disks, and its table; needs root (BENCH_ARGS)"
	@echo "make remote-lab          tests with images over iSCSI, ssh, NFS and https; needs root"
	@echo "make ceph-lab            tests with RBD images on a small Ceph cluster of its own; needs root"
	@echo "make docs-lab            README and other documents run as written, in a guest; needs root"
	@echo "make package-lab         the Debian package installed, upgraded, removed in a guest; needs root"
	@echo "make health-lab          arrays and drives that fail, and the mails about them, in a guest; needs root"
	@echo "make fuzz MINUTES=10     each fuzz target for so many minutes"
	@echo "make lab                 all that takes too long for make test, one after the other: hours"
	@echo "make bench               the table of docs/benchmarks.md (BENCH_ARGS=--help for more)"
	@echo "make bench-vm            before and after tables of a VM's disk (docs/bench-vm.md); BENCH_ARGS too"

run:
	@scripts/setup.sh run
	@scripts/demo.sh

build:
	@scripts/setup.sh build
	@scripts/build.sh

deb:
	@scripts/setup.sh build
	@scripts/deb.sh

dist:
	@scripts/setup.sh build
	@scripts/dist.sh

test:
	@scripts/setup.sh test
	@scripts/test.sh

sim:
	@scripts/setup.sh build
	@scripts/sim.sh $(SEEDS)

kill9:
	@scripts/setup.sh test
	@CYCLES=$(CYCLES) scripts/kill9.sh

guest-lab:
	@scripts/setup.sh test
	@GUEST_ROUNDS=$(ROUNDS) scripts/guest-lab.sh test

nfs-lab:
	@scripts/setup.sh test
	@scripts/nfs-lab.sh

storage-vm-lab:
	@scripts/setup.sh bench
	@scripts/storage-vm-lab.sh $(BENCH_ARGS)

remote-lab:
	@scripts/setup.sh test
	@scripts/remote-lab.sh

ceph-lab:
	@scripts/setup.sh test
	@scripts/setup.sh ceph
	@scripts/ceph-lab.sh

package-lab:
	@scripts/setup.sh test
	@scripts/package-lab.sh

health-lab:
	@scripts/setup.sh test
	@scripts/health-lab.sh

docs-lab:
	@scripts/setup.sh test
	@scripts/docs-lab.sh

fuzz:
	@scripts/setup.sh build
	@scripts/fuzz.sh $(MINUTES)

lab:
	@scripts/setup.sh test
	@scripts/lab.sh $(LAB_ARGS)

bench:
	@scripts/setup.sh bench
	@scripts/bench.sh $(BENCH_ARGS)

bench-vm:
	@scripts/setup.sh bench
	@scripts/bench-vm.sh $(BENCH_ARGS)
