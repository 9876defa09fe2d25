//! The way back: telling a hypervisor that the disk has grown.
//!
//! Messages of ours go over a socket of their own, which the client sends us
//! (`VHOST_USER_SET_BACKEND_REQ_FD`). The protocol crate takes that message, but cannot send
//! what we want to say (`VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`), and keeps the socket to itself.
//! So this one message is taken out of the stream before the crate sees it. Layout:
//! vhost-user.rst, "Message Specification".

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use vhost::vhost_user::message::{BackendReq, FrontendReq, MAX_MSG_SIZE};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Bytes of a message's header: request, flags, size of the body.
const HEADER: usize = 12;
/// The version every message carries.
const VERSION: u32 = 1;
/// The message is an answer.
const REPLY: u32 = 4;
/// An answer is wanted.
const NEED_REPLY: u32 = 8;

/// Which message comes next, without taking it; `None` at the end of the stream.
pub fn next_code(socket: &UnixStream) -> io::Result<Option<u32>> {
    let mut raw = [0u8; 4];
    loop {
        // SAFETY: four writable bytes; the descriptor is open.
        let n = unsafe {
            libc::recv(
                socket.as_raw_fd(),
                raw.as_mut_ptr().cast(),
                raw.len(),
                libc::MSG_PEEK,
            )
        };
        match n {
            0 => return Ok(None),
            1.. => return Ok(Some(u32::from_ne_bytes(raw))),
            _ => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
}

/// True for the message that [`take`] takes.
pub fn is_channel(code: u32) -> bool {
    code == u32::from(FrontendReq::SET_BACKEND_REQ_FD)
}

/// Takes the message with the socket for our requests, and answers if `acks` were agreed on.
pub fn take(socket: &UnixStream, acks: bool) -> io::Result<OwnedFd> {
    let bad = |why| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut header = [0u8; HEADER];
    let (n, file) = socket.recv_with_fd(&mut header).map_err(io::Error::from)?;
    let file = file.ok_or_else(|| bad("a channel was announced, but no socket came with it"))?;
    if n != HEADER {
        return Err(bad("half a message header"));
    }
    let word = |i: usize| {
        let [a, b, c, d] = [header[i], header[i + 1], header[i + 2], header[i + 3]];
        u32::from_ne_bytes([a, b, c, d])
    };
    let (flags, size) = (word(4), word(8) as usize);
    if size > MAX_MSG_SIZE {
        return Err(bad("a message longer than 4 KiB"));
    }
    let mut body = vec![0u8; size];
    io::Read::read_exact(&mut &*socket, &mut body)?;
    if acks && flags & NEED_REPLY != 0 {
        let mut reply =
            message(FrontendReq::SET_BACKEND_REQ_FD.into(), VERSION | REPLY, 8).to_vec();
        reply.extend_from_slice(&0u64.to_ne_bytes());
        io::Write::write_all(&mut &*socket, &reply)?;
    }
    Ok(file.into())
}

fn message(code: u32, flags: u32, size: u32) -> [u8; HEADER] {
    let mut raw = [0u8; HEADER];
    raw[..4].copy_from_slice(&code.to_ne_bytes());
    raw[4..8].copy_from_slice(&flags.to_ne_bytes());
    raw[8..].copy_from_slice(&size.to_ne_bytes());
    raw
}

/// Says that the configuration space has changed. A client that does not read its channel
/// learns of it when it asks the next time.
pub fn config_changed(channel: &OwnedFd) -> io::Result<()> {
    let raw = message(BackendReq::CONFIG_CHANGE_MSG.into(), VERSION, 0);
    // SAFETY: readable bytes of that length; the descriptor is open. Does not wait.
    let n = unsafe {
        libc::send(
            channel.as_raw_fd(),
            raw.as_ptr().cast(),
            raw.len(),
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    if n < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
