//! What programs do with a datastore's files through the client of a real kernel, over the daemon: random operations on a file that is
//! cached, by two clients in turn, and on names by two clients at once, while the daemon is killed. Every operation is
//! held against what should come of it, and in the end the directories of this host against what the clients have.
//!
//! The programs ([`working`]) are this test, brought into the guest on a disk. `WORK_SEED`, `WORK_OPERATIONS` (on data) and `WORK_NAMES` (on
//! names) choose others than the usual ones.
//!
//! Exclusive: processors

use crate::kernel_client;
use std::fs;
use std::path::{Path, PathBuf};

use crate::stored::{LIMIT, Lab, lasting_address};
use crate::working::{WORK, asked, data, names, sum};
use anyhow::{Context, Result, ensure};
use hearth_rig::machine::{Job, Machine, Plan};
use hearth_rig::wait::until;

/// Operations of a run, if nothing else is said: on data, and on names by each client. The lab does ten times as many and more.
const OPERATIONS: u64 = 2_000;
const NAME_OPERATIONS: u64 = 250;
/// The same for what is tried on a directory of this host.
const LOCAL_OPERATIONS: u64 = 3_000;
/// Two clients: one that keeps attributes, and one that asks each time. Neither believes that a name is not there because it was not.
const CLIENTS: [(&str, &str); 2] = [
    ("/mnt", ",lookupcache=none"),
    ("/other", ",nosharecache,noac,lookupcache=none"),
];

fn number(name: &str, usual: u64) -> Result<u64> {
    match std::env::var(name) {
        Ok(number) => number
            .parse()
            .with_context(|| format!("{name} is no number")),
        Err(_) => Ok(usual),
    }
}

/// No test of its own: what works in the guest, this program started again.
#[test]
fn work_for_another() -> Result<()> {
    let Some(asked) = asked()? else {
        return Ok(());
    };
    let (seed, operations) = (asked.seed, asked.operations);
    let place = asked.places.first().context("a place")?;
    match asked.what.as_str() {
        "data" => println!("\nEND {}", data::work(&asked.places, seed, operations)?),
        "names" => {
            // Two workers, told apart by their clients.
            let worker = u64::from(place != Path::new(CLIENTS[0].0));
            let told = PathBuf::from(format!("/tmp/done{worker}"));
            names::work(place, worker, seed, operations, |n| {
                Ok(fs::write(&told, n.to_string())?)
            })?;
        }
        "listing" => {
            for line in names::listing(place)? {
                println!("\nEND {line}");
            }
        }
        other => anyhow::bail!("there is no {other}"),
    }
    Ok(())
}

/// The programs themselves, on a directory of this host: what they expect is what a file system does.
#[test]
fn a_file_system_does_what_is_expected() -> Result<()> {
    let dir = tempfile::tempdir_in(
        hearth_rig::daemon::binary()?
            .parent()
            .context("a directory")?,
    )?;
    let here = [dir.path().to_owned(), dir.path().to_owned()];
    let end = data::work(&here, number("WORK_SEED", 1)?, LOCAL_OPERATIONS)?;
    let words: Vec<&str> = end.split(' ').collect();
    let content = fs::read(dir.path().join(words[0]))?;
    ensure!(format!("{:x}", sum(&content)) == words[2], "{end}");
    fs::remove_file(dir.path().join(words[0]))?;
    names::prepare(dir.path())?;
    std::thread::scope(|scope| -> Result<()> {
        let worker = |n| {
            let dir = dir.path();
            scope.spawn(move || names::work(dir, n, 1, LOCAL_OPERATIONS, |_| Ok(())))
        };
        let both = [worker(0), worker(1)];
        both.into_iter()
            .try_for_each(|worker| worker.join().expect("no panic"))
    })
}

/// A file that is not what it should be is noticed.
#[test]
fn what_is_wrong_is_noticed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    // Two directories that are not the same are two clients of which one does not see what the other did.
    let places = ["a", "b"].map(|name| dir.path().join(name));
    for place in &places {
        fs::create_dir(place)?;
    }
    let failed = data::work(&places, 1, 200).err().context("not noticed")?;
    ensure!(
        format!("{failed:#}").contains("seed 1, operation"),
        "{failed:#}"
    );
    Ok(())
}

/// Exists in the guest once any work has ended.
const ENDED: &str = "/tmp/ended";

/// A guest with two clients of a datastore.
struct Clients {
    guest: Machine,
}

impl Clients {
    fn new(lab: &Lab, port: u16) -> Result<Clients> {
        // The programs come on a disk of their own.
        let dir = lab.hearth.dir();
        let program = std::env::current_exe()?;
        let image = kernel_client::brought(dir, std::slice::from_ref(&program))?;
        let name = program.file_name().and_then(|name| name.to_str());
        let name = name.context("a name")?;
        let plan = Plan::new(2).own_root()?.image(&image).network();
        let mut guest = Machine::boot(dir, "g", &plan)?;
        guest.run("modprobe virtio_net && modprobe nfsv3")?;
        guest.run("ip link set lo up; ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0")?;
        guest.run("mkdir -p /program && mount -o ro /dev/vdb /program")?;
        // By this name it is looked for.
        guest.run(&format!("ln -s /program/{name} /run/work"))?;
        for (at, options) in CLIENTS {
            kernel_client::mount(&mut guest, port, at, options)?;
        }
        Ok(Clients { guest })
    }

    fn start(&mut self, what: &str, seed: u64, operations: u64, places: &str) -> Result<Job> {
        self.guest.start(&format!(
            "{WORK}='{what} {seed} {operations} {places}' RUST_BACKTRACE=0 /run/work --exact guest_files::work_for_another --nocapture; \
             status=$?; touch {ENDED}; (exit $status)"
        ))
    }

    /// What was told at the end of work.
    fn told(&mut self, job: &Job) -> Result<Vec<String>> {
        let said = self.guest.wait_ok(job)?;
        ensure!(said.contains("1 passed"), "{said}");
        let lines = said.lines().filter_map(|line| line.strip_prefix("END "));
        Ok(lines.map(str::to_owned).collect())
    }
}

/// Unless files of this host cannot be given what tells them apart in two trees.
fn mirrored(listen: &str) -> Result<Option<Lab>> {
    match Lab::mirrored_with(listen, "127.0.0.1", |_| Ok(())) {
        Err(e) if format!("{e:#}").contains("cannot be marked as a tree") => {
            eprintln!("two directories: skipped: {e:#}");
            Ok(None)
        }
        other => other.map(Some),
    }
}

fn both_current(lab: &Lab) -> Result<()> {
    until("both trees hold everything", LIMIT, || {
        let shown = lab.show().ok()?;
        let trees = shown["trees"].as_array()?;
        trees
            .iter()
            .all(|tree| tree["state"] == "current")
            .then_some(())
    })
}

/// A file is worked on by two clients in turn, and is a disk of the cache all the while.
#[test]
fn a_cached_file_holds_what_two_clients_put_into_it() -> Result<()> {
    let address = lasting_address()?;
    let lab = Lab::with(&[], None, &address.to_string())?;
    let mut clients = Clients::new(&lab, address.port())?;
    let (seed, operations) = (
        number("WORK_SEED", 1)?,
        number("WORK_OPERATIONS", OPERATIONS)?,
    );
    let places = CLIENTS.map(|(at, _)| at).join(" ");
    let job = clients.start("data", seed, operations, &places)?;
    let told = clients.told(&job)?;
    clients.guest.no_disk_errors()?;
    let shown = lab.show()?;
    ensure!(
        shown["disks"].as_u64() >= Some(1),
        "nothing was cached: {shown}"
    );
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    let told = told.first().context("how it ended")?;
    let words: Vec<&str> = told.split(' ').collect();
    let content = fs::read(lab.vms.join(words[0]))?;
    ensure!(content.len().to_string() == words[1], "{told}");
    ensure!(format!("{:x}", sum(&content)) == words[2], "{told}");
    eprintln!("seed {seed}, {operations} operations: {told}");
    Ok(())
}

/// Two clients work on names in the same directories, of which there are two copies, while the daemon is killed: each of their own names
/// is what they were answered, and both clients and both directories have the same in the end.
#[test]
fn names_are_what_two_clients_were_answered_while_the_daemon_is_killed() -> Result<()> {
    let address = lasting_address()?;
    let Some(mut lab) = mirrored(&address.to_string())? else {
        return Ok(());
    };
    both_current(&lab)?;
    let mut clients = Clients::new(&lab, address.port())?;
    let seed = number("WORK_SEED", 1)?;
    let operations = number("WORK_NAMES", NAME_OPERATIONS)?;
    let kills = number("CYCLES", 3)?;
    clients
        .guest
        .run("for n in 0 1 2 3; do mkdir /mnt/d$n; done")?;
    let mut jobs = Vec::new();
    for (at, _) in CLIENTS {
        jobs.push(clients.start("names", seed, operations, at)?);
    }
    for kill in 1..=kills {
        let goal = operations * kill / (kills + 1);
        let reached = |n| format!("test $(cat /tmp/done{n} 2>/dev/null || echo 0) -ge {goal}");
        let both = format!("{} && {}", reached(0), reached(1));
        // Or one of them failed before.
        let more = format!("{{ {both}; }} || test -e {ENDED}");
        kernel_client::wait_until(&mut clients.guest, address.port(), &more)?;
        let waited = clients.guest.run(&both);
        if let Err(e) = waited {
            for job in &jobs {
                clients.told(job)?;
            }
            return Err(e);
        }
        lab.hearth.kill9()?;
        lab.hearth.start()?;
    }
    for job in &jobs {
        clients.told(job)?;
    }
    let mut seen = Vec::new();
    for (at, _) in CLIENTS {
        let job = clients.start("listing", 0, 0, at)?;
        seen.push(clients.told(&job)?);
    }
    clients.guest.no_disk_errors()?;
    ensure!(seen[0] == seen[1], "{seen:?}");
    both_current(&lab)?;
    lab.hearth.ok(&["datastore", "flush", "vms"])?;
    for dir in ["a", "b"] {
        let here = names::listing(&lab.hearth.dir().join(dir))?;
        ensure!(here == seen[0], "{dir}: {here:?} and not {:?}", seen[0]);
    }
    eprintln!(
        "seed {seed}, {operations} operations of each, {kills} kills: {} names",
        seen[0].len()
    );
    Ok(())
}
