//! Integration tests of `hearth-nfs`, one module per subject.

mod common;
mod host;
mod programs;
#[macro_use]
mod stage;

mod clients;
mod directory;
mod esxi;
mod locks;
mod names;
mod rpcbind;
mod server;
mod wire;
