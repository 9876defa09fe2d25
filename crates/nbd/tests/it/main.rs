//! Integration tests of `hearth-nbd`, one module per subject.

mod common;
mod socket;

mod chunks;
mod clients;
mod handshake;
mod neighbours;
mod tls;
mod transmission;
