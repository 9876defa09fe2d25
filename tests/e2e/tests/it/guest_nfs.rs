//! The NFS server and the NFS client of a real kernel: a guest mounts a directory of this host.
//!
//! The server runs in a process of its own (this very program, started again), so that it can be killed
//! while the guest works. The guest's own root is local: only what the test looks at is on NFS.
//!
//! Exclusive: processors

use crate::kernel_client;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::stored::lasting_address;
use anyhow::{Context, Result, ensure};
use hearth_nfs::access::{Access, Rights};
use hearth_nfs::local::Directory;
use hearth_nfs::server::{Config, Server};
use hearth_rig::machine::{Machine, Plan};

/// Tells this program that it is to serve: directory, state and address.
const SERVE: &str = "HEARTH_E2E_NFS_SERVE";

/// No test of its own: what [`Serving`] starts. Ends with its standard input.
#[test]
fn serve_for_another() -> Result<()> {
    let Ok(what) = std::env::var(SERVE) else {
        return Ok(());
    };
    let [dir, state, listen] = &what.split('\n').collect::<Vec<_>>()[..] else {
        anyhow::bail!("directory, state and address");
    };
    let server = Server::start(&Config {
        listen: vec![listen.parse()?],
        ..Config::default()
    })?;
    let (directory, identity) = Directory::open(Path::new(dir), Path::new(state))?;
    let access = Access::nobody().allow(
        "127.0.0.1".parse()?,
        Rights {
            write: true,
            root: true,
            insecure: true,
            ..Rights::default()
        },
    );
    server.offer(directory.export("/vms", &identity), access)?;
    eprintln!("serving {}", server.addresses()[0]);
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// A server in a process of its own, killed when dropped.
struct Serving {
    child: Child,
    address: SocketAddr,
}

impl Serving {
    fn start(place: &Path, listen: SocketAddr) -> Result<Serving> {
        let what = format!("{0}/vms\n{0}/state\n{listen}", place.display());
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--exact", "guest_nfs::serve_for_another", "--nocapture"])
            .env(SERVE, what)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut said = String::new();
        let mut lines = BufReader::new(child.stderr.take().context("its messages")?);
        while lines.read_line(&mut said)? > 0 {
            if let Some(address) = said
                .lines()
                .last()
                .and_then(|line| line.strip_prefix("serving "))
            {
                let address = address.parse()?;
                return Ok(Serving { child, address });
            }
        }
        child.kill()?;
        child.wait()?;
        anyhow::bail!("no server: {said}")
    }

    fn kill(&mut self) -> Result<SocketAddr> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(self.address)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It may have been killed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Lab {
    place: tempfile::TempDir,
    serving: Serving,
    guest: Machine,
}

impl Lab {
    /// A guest that has mounted the directory at /mnt. `None`, and a line that says why, where files cannot be found again.
    fn new(test: &str) -> Result<Option<Lab>> {
        let place = tempfile::tempdir()?;
        fs::create_dir(place.path().join("vms"))?;
        if let Err(error) = Directory::open(&place.path().join("vms"), &place.path().join("state"))
        {
            eprintln!("{test}: skipped: {error}");
            return Ok(None);
        }
        // Nobody else may come to have the port while no server has it.
        let serving = Serving::start(place.path(), lasting_address()?)?;
        let mut guest = Machine::boot(place.path(), "g", &Plan::new(2).own_root()?.network())?;
        guest.run("modprobe virtio_net && modprobe nfsv3")?;
        guest.run("ip link set lo up; ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0")?;
        let mut lab = Lab {
            place,
            serving,
            guest,
        };
        lab.mount("/mnt", "")?;
        Ok(Some(lab))
    }

    fn mount(&mut self, at: &str, options: &str) -> Result<()> {
        let port = self.serving.address.port();
        kernel_client::mount(&mut self.guest, port, at, options)
    }

    fn dir(&self) -> PathBuf {
        self.place.path().join("vms")
    }
}

/// Ends a test where it cannot be made.
macro_rules! lab {
    ($name:literal) => {
        match Lab::new($name)? {
            Some(lab) => lab,
            None => return Ok(()),
        }
    };
}

/// What a file system has to do, in the spirit of the Connectathon's basic, general and special tests.
#[test]
fn a_kernel_finds_a_file_system() -> Result<()> {
    let mut lab = lab!("a_kernel_finds_a_file_system");
    let info = lab
        .guest
        .run("grep ' /mnt nfs ' /proc/mounts; df -k /mnt | tail -1")?;
    ensure!(
        info.contains("rsize=1048576") && info.contains("wsize=1048576"),
        "{info}"
    );
    // Names: files, directories, links, renames over what is there, and what is refused.
    lab.guest.run("cd /mnt && mkdir -p a/b/c && echo one >a/b/c/f && ln a/b/c/f a/g && ln -s b/c/f a/l && test \"$(cat a/l)\" = one && test \"$(stat -c %h a/g)\" = 2")?;
    lab.guest.run("cd /mnt && echo two >a/h && mv a/h a/g && test \"$(cat a/g)\" = two && test \"$(stat -c %h a/b/c/f)\" = 1")?;
    lab.guest.run("cd /mnt && ! rmdir a 2>/dev/null && ! mv a/g a/b 2>/dev/null/x && ! mkdir a/b 2>/dev/null && mkfifo a/p && rm a/p")?;
    lab.guest.run("cd /mnt && mv a/b moved && test \"$(cat moved/c/f)\" = one && ! test -e a/b && test -L a/l && ! cat a/l 2>/dev/null")?;
    ensure!(fs::read_to_string(lab.dir().join("moved/c/f"))? == "one\n");
    // A file that is removed while it is open goes on, and is gone afterwards.
    lab.guest.run("cd /mnt && echo open >o && exec 3<o && rm o && ! test -e o && test \"$(cat <&3)\" = open && exec 3<&-")?;
    // One that is renamed over while it is open is still the old one.
    lab.guest.run("cd /mnt && echo old >o && echo new >n && exec 3<o && mv n o && test \"$(cat <&3)\" = old && test \"$(cat o)\" = new && exec 3<&-")?;
    // Attributes; only root's server can give files away.
    let root = fs::metadata("/proc/self")?.uid() == 0;
    let (give, owner) = if root {
        ("chown 12:34 t &&", "12 34")
    } else {
        ("", "$(stat -c '%u %g' t)")
    };
    lab.guest.run(&format!("cd /mnt && touch -d '2001-02-03 04:05:06' t && chmod 640 t && {give} test \"$(stat -c '%a %u %g %Y' t)\" = \"640 {owner} $(date -u -d '2001-02-03 04:05:06' +%s)\""))?;
    // Only one of many wins an exclusive create.
    let winners = lab.guest.run("cd /mnt && for i in 1 2 3 4 5 6 7 8; do (set -C; echo $i >lock) 2>/dev/null && echo $i & done; wait")?;
    ensure!(winners.split_whitespace().count() == 1, "{winners}");
    // 5,000 names, each found once: the most are the host's, for each of the guest's is made durable.
    fs::create_dir(lab.dir().join("many"))?;
    for n in 201..=5000 {
        fs::write(lab.dir().join(format!("many/{n}")), "")?;
    }
    let count = lab
        .guest
        .run("cd /mnt/many && seq 1 200 | xargs touch && ls | sort -u | wc -l")?;
    ensure!(count.trim() == "5000", "{count}");
    ensure!(fs::read_dir(lab.dir().join("many"))?.count() == 5000);
    lab.guest
        .run("echo 2 >/proc/sys/vm/drop_caches; test $(ls -l /mnt/many | wc -l) -ge 5000")?;
    // Sparse, over 4 GiB, and beyond 2 TiB.
    lab.guest.run("cd /mnt && truncate -s 3298534883328 big && echo far | dd of=big bs=1 seek=2500000000000 conv=notrunc 2>/dev/null && sync && echo 3 >/proc/sys/vm/drop_caches && test \"$(dd if=big bs=1 skip=2500000000000 count=3 2>/dev/null)\" = far")?;
    let big = fs::metadata(lab.dir().join("big"))?;
    ensure!(
        big.len() == 3 << 40 && big.blocks() * 512 < 1 << 20,
        "{} {}",
        big.len(),
        big.blocks()
    );
    // What the host writes is seen when the file is opened again.
    fs::write(lab.dir().join("host"), "from the host")?;
    ensure!(lab.guest.run("cat /mnt/host")? == "from the host");
    lab.guest.run("umount /mnt")?;
    Ok(())
}

/// Two mounts of one directory are two clients: what one closes, the other opens.
#[test]
fn two_clients_see_each_other() -> Result<()> {
    let mut lab = lab!("two_clients_see_each_other");
    lab.mount("/other", ",nosharecache,noac")?;
    lab.guest.run(
        "for i in $(seq 1 50); do echo $i >/mnt/x && test \"$(cat /other/x)\" = $i || exit 1; done",
    )?;
    lab.guest.run("for i in $(seq 1 50); do echo $i >/other/$i && mv /other/$i /other/y && test \"$(cat /mnt/y)\" = $i || exit 1; done")?;
    lab.guest.run("(for i in $(seq 1 60); do echo a >>/mnt/a; done) & (for i in $(seq 1 60); do echo b >>/other/b; done) & wait; test $(wc -l </other/a) = 60 && test $(wc -l </mnt/b) = 60")?;
    Ok(())
}

/// The server is killed again and again while the guest writes and checks: the guest goes on, and
/// nothing is lost or false.
#[test]
fn killed_under_load_the_guest_goes_on() -> Result<()> {
    let mut lab = lab!("killed_under_load_the_guest_goes_on");
    let cycles: u32 = std::env::var("CYCLES")
        .ok()
        .and_then(|c| c.parse().ok())
        .unwrap_or(5);
    // fio checks what it reads against what it wrote; both with and without the client's cache.
    let job = |name: &str, more: &str| {
        format!(
            "fio --name={name} --filename=/mnt/{name} --size=24M --rw=randrw --bs=4k-64k --ioengine=psync --verify=crc32c --verify_backlog=64 --verify_fatal=1 --do_verify=1 --loops=1000 --time_based --runtime=600 --minimal {more}"
        )
    };
    let direct = lab.guest.start(&job("direct", "--direct=1"))?;
    let cached = lab.guest.start(&job("cached", "--fsync=16"))?;
    // Names that are said to be there, are: each is noted outside of NFS when it was answered.
    let names = lab.guest.start("trap 'touch /tmp/ended' EXIT; cd /mnt && mkdir names && i=0; while ! test -e /tmp/stop; do i=$((i+1)); (set -C; echo $i >names/n$i) || exit 1; mv names/n$i names/m$i || exit 1; echo $i >/tmp/done; done")?;
    for cycle in 0..cycles {
        // Some work has to be done between two kills, or nothing would be disturbed.
        let before: u64 = lab
            .guest
            .run("cat /tmp/done 2>/dev/null || echo 0")?
            .trim()
            .parse()?;
        let more = format!(
            "test -e /tmp/ended || test \"$(cat /tmp/done 2>/dev/null || echo 0)\" -ge {}",
            before + 10
        );
        let port = lab.serving.address.port();
        kernel_client::wait_until(&mut lab.guest, port, &more)?;
        ensure!(
            !lab.guest.has_ended(&names)?,
            "no names are made any more: {:?}",
            lab.guest.wait(&names)?
        );
        let address = lab.serving.kill()?;
        // Where the clients know it.
        lab.serving = Serving::start(lab.place.path(), address)?;
        for job in [&direct, &cached, &names] {
            ensure!(
                !lab.guest.has_ended(job)?,
                "a job ended in cycle {cycle}: {:?}",
                lab.guest.wait(job)?
            );
        }
    }
    lab.guest.run("touch /tmp/stop; killall -INT fio")?;
    lab.guest.wait_ok(&names)?;
    for job in [direct, cached] {
        let answer = lab.guest.wait(&job)?;
        ensure!(
            !answer.text.contains("verify") && !answer.text.contains("error="),
            "{}",
            answer.text
        );
    }
    let done: u64 = lab.guest.run("cat /tmp/done")?.trim().parse()?;
    for n in 1..=done {
        let content = fs::read_to_string(lab.dir().join(format!("names/m{n}")))?;
        ensure!(content == format!("{n}\n"), "{n}: {content}");
    }
    ensure!(fs::read_dir(lab.dir().join("names"))?.count() as u64 >= done);
    lab.guest.no_disk_errors()?;
    eprintln!("{done} names and {cycles} kills");
    Ok(())
}
