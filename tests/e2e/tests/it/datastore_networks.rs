//! A host with a network for storage and one for people: who is on the one reaches the datastore and nothing else of
//! Hearth, who is on the other does not reach the datastore.
//!
//! The networks are our own: the test runs once more in a network of its own, which is the host's, and there as
//! an ESXi host on the one cable and as somebody in the office on the other.

use crate::host;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use crate::stored::nfs::{Client, port_of};
use crate::stored::{LIMIT, Lab};
use anyhow::{Context, Result, bail, ensure};
use hearth_nfs::{mount, portmap, v3};
use hearth_rig::daemon::{binary, path};
use hearth_rig::monitor::Monitor;
use hearth_rig::wait::until;

const TEST: &str = "datastore_networks::who_reaches_the_datastore_reaches_nothing_else";
/// Whose part is played.
const ROLE: &str = "HEARTH_TEST_ROLE";
/// The directory of the datastore.
const PLACE: &str = "HEARTH_TEST_PLACE";
/// Where the command line finds the daemon.
const RUN_DIR: &str = "HEARTH_RUN_DIR";
/// The host on the network for storage and on that for people.
const STORAGE: &str = "192.0.2.1";
const PEOPLE: &str = "198.51.100.1";
/// Where the console is if nothing else was said.
const CONSOLE: u16 = 8477;
/// Nobody who refuses takes longer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The network of the host, seen by who has the other ends of its cables.
const NETWORK: &str = r#"
set -e
mount -t tmpfs tmpfs /run
ip link set lo up
cable() {
    ip netns add "$1"
    ip link add "$1" type veth peer name eth0 netns "$1"
    ip addr add "$2/24" dev "$1"
    ip link set "$1" up
    ip -n "$1" addr add "$3/24" dev eth0
    ip -n "$1" link set eth0 up
    ip -n "$1" link set lo up
    ip -n "$1" route add default via "$2"
}
cable esxi 192.0.2.1 192.0.2.10
cable office 198.51.100.1 198.51.100.10
exec "$0" --exact "$1" --nocapture
"#;

#[test]
fn who_reaches_the_datastore_reaches_nothing_else() -> Result<()> {
    match env::var(ROLE).as_deref() {
        Ok("host") => host(),
        Ok("esxi") => esxi(),
        Ok("office") => office(),
        _ => {
            let mut command = Command::new("unshare");
            command.args(["--net", "--mount", "sh", "-c", NETWORK]);
            let said = again(command.arg(env::current_exe()?).arg(TEST), "host")?;
            if let Some(why) = said.lines().find(|line| line.contains("not permitted")) {
                eprintln!("{TEST}: skipped: {why}");
                return Ok(());
            }
            ensure!(said.contains("1 passed"), "{said}");
            Ok(())
        }
    }
}

/// Runs this program once more; what it said.
fn again(command: &mut Command, role: &str) -> Result<String> {
    let output = command.env(ROLE, role).output().context("unshare or ip")?;
    let said = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&said).into_owned())
}

fn host() -> Result<()> {
    let listen = format!("{STORAGE}:2049");
    let lab = Lab::with(&[], None, &listen)?;
    let clients = [
        "datastore",
        "set",
        "vms",
        "--client",
        "192.0.2.0/24=rw,root",
    ];
    lab.hearth.ok(&clients)?;
    ensure!(lab.show()?["portmapper"] == true, "{}", lab.show()?);
    // The console, as it is when it is enabled.
    let monitor = lab.hearth.dir().join("monitor");
    let enable = ["console", "enable", "--state-dir", path(&monitor)];
    lab.hearth.ok(&enable)?;
    let _monitor = Monitor::start(&lab.hearth, &[])?;
    until("the console answers people on this host", LIMIT, || {
        TcpStream::connect(("127.0.0.1", CONSOLE)).ok()
    })?;
    // Nothing else listens but on the address for storage: the control socket is no address at all.
    for (local, port) in listening()? {
        let known = local == STORAGE && [2049, portmap::PORT].contains(&port)
            || local == "127.0.0.1" && port == CONSOLE;
        ensure!(known, "something listens on {local}, port {port}");
    }
    for role in ["esxi", "office"] {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", role]);
        command
            .arg(env::current_exe()?)
            .args(["--exact", TEST, "--nocapture"]);
        command
            .env(PLACE, &lab.vms)
            .env(RUN_DIR, lab.hearth.run_dir());
        let said = again(&mut command, role)?;
        ensure!(
            said.contains("1 passed"),
            "{role}: {said}\n{}",
            lab.hearth.log()
        );
    }
    Ok(())
}

/// Addresses and ports on which anything listens here over TCP, IPv6 included.
fn listening() -> Result<Vec<(String, u16)>> {
    let mut all = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in fs::read_to_string(table)
            .unwrap_or_default()
            .lines()
            .skip(1)
        {
            let words: Vec<&str> = line.split_whitespace().collect();
            let (Some(local), Some(&"0A")) = (words.get(1), words.get(3)) else {
                continue;
            };
            let (address, port) = local.split_once(':').context("an address and a port")?;
            let address = match u32::from_str_radix(address, 16) {
                Ok(v4) if address.len() == 8 => {
                    std::net::Ipv4Addr::from(v4.swap_bytes()).to_string()
                }
                _ => address.to_owned(),
            };
            all.push((address, u16::from_str_radix(port, 16)?));
        }
    }
    Ok(all)
}

fn at(port: u16) -> Result<SocketAddr> {
    Ok(SocketAddr::new(STORAGE.parse()?, port))
}

/// Mounts by what the portmapper says, and works as ESXi does.
fn esxi() -> Result<()> {
    let place = PathBuf::from(env::var_os(PLACE).context(PLACE)?);
    let find = |program| at(port_of(at(portmap::PORT)?, program)?);
    let root = Client::connect(find(mount::PROGRAM)?)?.mount("/vms")?;
    let root = root.ok().context("it may not mount")?;
    // The control socket is a file: who is on the network alone has none.
    host::work(find(v3::PROGRAM)?, &root, &place, || {
        let mut flush = Command::new(binary()?);
        let flush = flush.args(["datastore", "flush", "vms"]).output()?;
        ensure!(flush.status.success(), "{flush:?}");
        Ok(())
    })?;
    for port in [22, 80, 443, 8080, CONSOLE, 10809] {
        for address in [PEOPLE, STORAGE] {
            let at = SocketAddr::new(address.parse()?, port);
            let other = TcpStream::connect_timeout(&at, PATIENCE);
            ensure!(other.is_err(), "{at} is open");
        }
    }
    Ok(())
}

/// Is on the other network, and knows the way to the first.
fn office() -> Result<()> {
    let mut client = match Client::connect(at(2049)?) {
        Ok(client) => client,
        Err(_) => return Ok(()),
    };
    match client.mount("/vms") {
        Ok(Ok(_)) => bail!("somebody who was not allowed mounted it"),
        // Told so, or cut off.
        Ok(Err(_)) | Err(_) => Ok(()),
    }
}
