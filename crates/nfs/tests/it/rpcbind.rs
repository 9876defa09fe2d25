//! Debian's rpcbind, in a network of its own, told of a server.

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hearth_nfs::portmap::{self, Mapping, TCP};
use hearth_nfs::rpc::{Answer, Call, Credential, read_answer};
use hearth_nfs::rpcbind::{ADDRESS, Refused, Registration};
use hearth_nfs::xdr::{Reader, Writer};

const INSIDE: &str = "HEARTH_TEST_INSIDE";
const NFS: Mapping = Mapping {
    program: 100_003,
    version: 3,
    protocol: TCP,
    port: 2049,
};
const MOUNT: Mapping = Mapping {
    program: 100_005,
    version: 3,
    protocol: TCP,
    port: 2049,
};

/// The port rpcbind tells for a program; `None` if it does not answer yet.
fn port(program: u32) -> Result<Option<u32>> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    let call = Call {
        xid: 8,
        program: portmap::PROGRAM,
        version: 2,
        procedure: 3,
        credential: Credential::None,
    };
    let mut w = Writer::new();
    call.write(&mut w);
    w.u32(program).u32(3).u32(TCP).u32(0);
    socket.send_to(w.as_slice(), ADDRESS)?;
    let mut bytes = [0; 128];
    let Ok(len) = socket.recv(&mut bytes) else {
        return Ok(None);
    };
    let mut r = Reader::new(&bytes[..len]);
    ensure!(read_answer(&mut r)? == (8, Answer::Success));
    Ok(Some(r.u32()?))
}

#[test]
fn the_hosts_portmapper_is_told_and_told_again() -> Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    let test = "rpcbind::the_hosts_portmapper_is_told_and_told_again";
    let there = |program: &str| {
        ["/usr/sbin", "/sbin", "/usr/bin"]
            .iter()
            .any(|d| Path::new(d).join(program).exists())
    };
    for program in ["rpcbind", "unshare", "ip"] {
        if !there(program) {
            // Installed, it would listen on this machine from then on: that is its owner's affair.
            eprintln!(
                "{test}: skipped: no {program}; install the package rpcbind to have this tried"
            );
            return Ok(());
        }
    }
    let own = std::env::current_exe()?;
    let script = format!(
        "mount -t tmpfs tmpfs /run && ip link set lo up && rpcbind -w 2>/run/said; \
         {} --exact {test} --nocapture; status=$?; kill $(cat /run/rpcbind.pid 2>/dev/null || pidof rpcbind) ; exit $status",
        own.display()
    );
    let output = Command::new("unshare")
        .args([
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            &script,
        ])
        .env(INSIDE, "1")
        .stdin(Stdio::null())
        .output()?;
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    if said.contains("Operation not permitted") {
        eprintln!("{test}: skipped: this user may not make a network of its own");
        return Ok(());
    }
    ensure!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
    Ok(())
}

fn inside() -> Result<()> {
    let since = Instant::now();
    while port(portmap::PROGRAM)?.is_none() {
        if since.elapsed() > Duration::from_secs(20) {
            bail!(
                "rpcbind does not come up: {}",
                std::fs::read_to_string("/run/said")?
            );
        }
    }
    ensure!(port(NFS.program)? == Some(0));
    let registration = Registration::make(ADDRESS, &[NFS, MOUNT])?;
    ensure!(port(NFS.program)? == Some(2049) && port(MOUNT.program)? == Some(2049));
    // As after a death: what is left behind is no hindrance to the same server.
    std::mem::forget(registration);
    let again = Registration::make(ADDRESS, &[NFS, MOUNT])?;
    // Somebody else does not get in between, and leaves nothing half done.
    let other = Mapping {
        port: 4000,
        ..MOUNT
    };
    match Registration::make(
        ADDRESS,
        &[
            Mapping {
                program: 400_000,
                ..NFS
            },
            other,
        ],
    ) {
        Err(Refused::No { program, .. }) => ensure!(program == MOUNT.program),
        other => bail!("{other:?}"),
    }
    ensure!(port(400_000)? == Some(0) && port(MOUNT.program)? == Some(2049));
    drop(again);
    ensure!(port(NFS.program)? == Some(0) && port(MOUNT.program)? == Some(0));
    // And where nobody is there.
    let nobody: SocketAddr = UdpSocket::bind("127.0.0.1:0")?.local_addr()?;
    let refused = Registration::make(nobody, &[NFS]).err().context("nobody")?;
    ensure!(matches!(refused, Refused::Silent(..)), "{refused}");
    Ok(())
}
