//! The way back: telling a hypervisor that the disk has grown.
//!
//! Messages of ours go over a socket of their own, which the client sends us
//! (`VHOST_USER_SET_BACKEND_REQ_FD`). The protocol crate takes that message, but cannot send
//! what we want to say (`VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`), and keeps the socket to itself.
//! So this one message is taken out of the stream before the crate sees it. Layout:
//! vhost-user.rst, "Message Specification".

use crate::backing::let_go;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use vhost::vhost_user::message::{BackendReq, FrontendReq, MAX_MSG_SIZE};

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
    let (n, mut fds) = receive(socket, &mut header)?;
    let fd = match fds.len() {
        1 => fds.pop(),
        _ => None,
    };
    // Whatever came too much is closed, and not while anybody waits.
    let_go(fds);
    let fd = fd.ok_or_else(|| bad("a channel was announced, but not one socket came with it"))?;
    if !is_socket(&fd) {
        let_go(vec![fd]);
        return Err(bad("a channel was announced, but what came is no socket"));
    }
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
    Ok(fd)
}

/// Receives bytes with every descriptor that comes with them: what is not taken here stays open in
/// our table for ever, and nobody knows its number.
fn receive(socket: &UnixStream, into: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control = Control([0; CONTROL]);
    let mut iov = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    let n = loop {
        // SAFETY: all-zero bytes are a valid msghdr.
        let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
        msg.msg_iov = &mut iov;
        msg.msg_iovlen = 1;
        msg.msg_control = control.0.as_mut_ptr().cast();
        msg.msg_controllen = CONTROL as _;
        // SAFETY: the header names live, writable memory of the lengths it gives.
        let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut msg, libc::MSG_CMSG_CLOEXEC) };
        match usize::try_from(n) {
            Ok(n) => break (n, descriptors(&msg)),
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    };
    Ok(n)
}

/// Most descriptors the kernel passes with one message (`SCM_MAX_FD`): with room for all of them
/// none can be cut off half-way.
const FDS_MAX: usize = 253;
/// Bytes of their control message: its header, the descriptors, and what alignment adds.
const CONTROL: usize = 16 + (FDS_MAX * size_of::<RawFd>()).next_multiple_of(8);

#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// All descriptors of a received message, now ours.
fn descriptors(msg: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel filled in the control buffer `msg` names, which lives; each header is
    // looked at only where the macros say that there is one.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(msg);
        while let Some(header) = at.as_ref() {
            if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
                // Its type is not the same in every C library.
                #[allow(clippy::unnecessary_cast)]
                let len = header.cmsg_len as usize;
                let bytes = len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(at).cast::<RawFd>();
                for i in 0..(bytes / size_of::<RawFd>()).min(FDS_MAX) {
                    fds.push(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                }
            }
            at = libc::CMSG_NXTHDR(msg, at);
        }
    }
    fds
}

fn is_socket(fd: &OwnedFd) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .is_ok_and(|link| link.as_os_str().as_encoded_bytes().starts_with(b"socket:["))
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
