//! End-to-end tests: the real daemon and real clients, one module per subject, in one program.
//!
//! Each test runs in a process of its own (`scripts/run-tests.py`): several change signals or limits
//! of the whole process, and several start this program again in another role.

// The client and the player of an ESXi host are those of the server's own tests.
#[path = "../../../../crates/nfs/tests/it/common/mod.rs"]
mod common;
mod failing;
#[path = "../../../../crates/nfs/tests/it/host.rs"]
mod host;
mod kernel_client;
#[path = "../../../../crates/nfs/tests/it/programs.rs"]
mod programs;
mod safe_files;
mod stored;
mod working;

mod alerts;
mod backups;
mod bad_input;
mod bench;
mod ceph;
mod changed_origin;
mod clients;
mod control;
mod crash_table;
mod datastore;
mod datastore_behind;
mod datastore_clients;
mod datastore_kept;
mod datastore_locks;
mod datastore_mirrored;
mod datastore_networks;
mod datastore_nlm;
mod datastore_scrubbed;
mod datastore_steps;
mod failed_flash;
mod fio_flash;
mod flash_full;
mod flash_left;
mod flash_only;
mod flash_place;
mod flash_removed;
mod flash_trimmed;
mod flood;
mod guest_attach;
mod guest_exercised;
mod guest_files;
mod guest_io;
mod guest_locks;
mod guest_mirrors;
mod guest_nfs;
mod guest_root;
mod guest_second_hop;
mod guest_storage;
mod hostile_vhost;
mod hung_flash;
mod hung_origin;
mod image_files;
mod images;
mod kill9;
mod many_disks;
mod memory;
mod mirrors;
mod monitor;
mod old_builds;
mod ordered;
mod origins;
mod own_client;
mod owners;
mod read_only;
mod recovery;
mod registry;
mod remote;
mod resident;
mod restart;
mod rolled_back;
mod sectors;
mod several_flash;
mod signals;
mod survives;
mod swap;
mod threads;
mod tls;
mod two_clients;
mod upgrade;
mod users;
mod vhost;
