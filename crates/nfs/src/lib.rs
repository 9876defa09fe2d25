//! NFS version 3 over TCP: the protocol, and nothing of what is behind it.
//!
//! A hypervisor that knows no NBD can mount NFS. What it then sends are remote procedure calls in a
//! format of 1995, over connections that carry many calls at once, are lost and made anew, and over
//! which anybody may send anything. Everything here is made to be told apart and tried without a
//! socket:
//!
//! | module | what it knows |
//! | --- | --- |
//! | [`xdr`] | how numbers, texts and byte strings are written (RFC 4506) |
//! | [`record`] | where a message begins and ends in a stream of bytes (RFC 5531, 11) |
//! | [`message`] | where in memory a message lies |
//! | [`rpc`] | who calls which procedure, and how calls are accepted and denied (RFC 5531) |
//! | [`nlm`] | how ranges of files are locked (NLM version 4) |
//! | [`nsm`] | how client and server learn of each other's restart (NSM version 1) |
//! | [`portmap`] | on which port a program is found (RFC 1833) |
//! | [`rpcbind`] | how the host's own portmapper is told of it |
//! | [`mount`] | how a client gets its first handle (RFC 1813, appendix I) |
//! | [`v3`] | what is asked of files, and how it is answered (RFC 1813) |
//! | [`handle`] | what clients call files |
//! | [`tree`] | what is needed of a tree of files |
//! | [`local`] | a directory as such a tree |
//! | [`identity`] | what an export keeps over restarts |
//! | [`server`] | connections and threads around all that |
//! | [`access`] | who may come, and whom they count as |
//!
//! Bytes from outside are bounded before they are kept: a length is compared with what is left of
//! the message before anything is reserved for it, and no message is longer than
//! [`record::MESSAGE_MAX`].

pub mod access;
pub mod handle;
pub mod identity;
pub mod ledger;
pub mod local;
pub mod message;
pub mod mount;
pub mod nlm;
pub mod nsm;
pub mod portmap;
pub mod record;
pub mod rpc;
pub mod rpcbind;
pub mod server;
pub mod tree;
pub mod v3;
pub mod xdr;
