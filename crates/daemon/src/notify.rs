//! Tells systemd how the service fares (`sd_notify(3)`).
//!
//! The protocol is one datagram of `KEY=value` lines to the socket named in `NOTIFY_SOCKET`;
//! a name beginning with `@` is in the abstract namespace. Without that variable everything here
//! does nothing, so the daemon runs the same outside systemd.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How much longer a stop that makes progress may take each time it says so.
pub const STOP_EXTENSION: Duration = Duration::from_secs(60);

/// How often a stop of this process has reported progress.
static EXTENSIONS: AtomicU64 = AtomicU64::new(0);

/// How often a stop of this process has reported progress.
pub(crate) fn extensions() -> u64 {
    EXTENSIONS.load(Ordering::Relaxed)
}

/// A way to the service manager, if there is one.
#[derive(Debug)]
pub struct Notify {
    socket: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
}

impl Notify {
    /// From the environment systemd gives a service.
    pub fn from_env() -> Notify {
        let address = std::env::var("NOTIFY_SOCKET")
            .ok()
            .and_then(|name| address(&name));
        let pid_is_ours = std::env::var("WATCHDOG_PID")
            .ok()
            .is_none_or(|p| p == std::process::id().to_string());
        let watchdog = std::env::var("WATCHDOG_USEC")
            .ok()
            .and_then(|v| v.parse().ok())
            .filter(|_| pid_is_ours);
        Notify {
            socket: address.and_then(|a| UnixDatagram::unbound().ok().map(|s| (s, a))),
            watchdog: watchdog.map(Duration::from_micros),
        }
    }

    /// Sends one or more `KEY=value` lines. Failure is not our caller's concern: a service
    /// manager that went away changes nothing for the disks.
    pub fn send(&self, state: &str) {
        if let Some((socket, address)) = &self.socket {
            let _ = socket.send_to_addr(state.as_bytes(), address);
        }
    }

    /// Start is complete.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={}", status.replace('\n', " ")));
    }

    /// The daemon is stopping.
    pub fn stopping(&self) {
        self.send("STOPPING=1");
    }

    /// Asks for another [`STOP_EXTENSION`] for a stop that makes progress, however long the unit allows.
    pub fn stop_goes_on(&self) {
        EXTENSIONS.fetch_add(1, Ordering::Relaxed);
        self.send(&format!(
            "EXTEND_TIMEOUT_USEC={}",
            STOP_EXTENSION.as_micros()
        ));
    }

    /// Half the watchdog interval: how often [`alive`](Self::alive) must be called; `None` when
    /// nobody watches.
    pub fn watchdog_period(&self) -> Option<Duration> {
        self.watchdog.map(|d| d / 2)
    }

    /// The daemon is alive.
    pub fn alive(&self) {
        self.send("WATCHDOG=1");
    }
}

fn address(name: &str) -> Option<SocketAddr> {
    match name.strip_prefix('@') {
        Some(abstract_name) => SocketAddr::from_abstract_name(abstract_name).ok(),
        None if name.starts_with('/') => SocketAddr::from_pathname(name).ok(),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notify_to(name: &str) -> Notify {
        let address = address(name).unwrap();
        Notify {
            socket: Some((UnixDatagram::unbound().unwrap(), address)),
            watchdog: None,
        }
    }

    #[test]
    fn messages_reach_a_path_and_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let listener = UnixDatagram::bind(&path).unwrap();
        notify_to(path.to_str().unwrap()).ready("serving\n3 disks");
        let mut buf = [0u8; 256];
        let n = listener.recv(&mut buf).unwrap();
        assert_eq!(&buf[..n], b"READY=1\nSTATUS=serving 3 disks");

        let name = format!("hearth-test-{}", std::process::id());
        let listener =
            UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        notify_to(&format!("@{name}")).stopping();
        let n = listener.recv(&mut buf).unwrap();
        assert_eq!(&buf[..n], b"STOPPING=1");
    }

    #[test]
    fn other_addresses_are_ignored() {
        assert!(address("vsock:2:1234").is_none());
        assert!(address("relative/path").is_none());
    }
}
