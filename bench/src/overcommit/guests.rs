//! The guests: a small web server whose files are in memory, a program that looks at pages and knows what has to be in
//! them, and who asks the server from outside.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hearth_rig::machine::{Job, Machine, Plan};
use hearth_rig::rng::Rng;

use super::host::Group;

/// A file of the web server.
pub const FILE: usize = 64 << 10;
/// Of each guest's data, MiB that are the web server's.
const WEB_MIB: usize = 192;
/// And MiB that are looked at by the program.
const TOUCH_MIB: usize = 16;
/// A guest, and what has to be in it.
#[derive(Debug)]
pub struct Guest {
    /// Its machine.
    pub machine: Machine,
    /// Its number.
    pub number: usize,
    /// Where its web server is reached.
    pub address: SocketAddr,
    /// Its data.
    pub data: PathBuf,
    touching: Option<Job>,
}

/// What one guest's program saw.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Touched {
    /// MiB it has looked at.
    pub chunks: u64,
    /// Of those, MiB that were not right.
    pub wrong: u64,
    /// Longest that one took, in seconds.
    pub longest: f64,
}

/// Data as programs have it (binaries of this host, of which lz4 makes about half), each block with a mark of its own.
pub fn make_data(to: &Path, number: usize, sources: &[PathBuf]) -> Result<()> {
    let size = (WEB_MIB + TOUCH_MIB) << 20;
    let mut bytes = Vec::with_capacity(size);
    for source in sources.iter().cycle().take(64) {
        File::open(source)
            .with_context(|| source.display().to_string())?
            .take((size - bytes.len()) as u64)
            .read_to_end(&mut bytes)?;
        if bytes.len() == size {
            break;
        }
    }
    bytes.resize(size, 0);
    for (block, chunk) in bytes.chunks_exact_mut(4096).enumerate() {
        chunk[..8].copy_from_slice(&(number as u64).to_le_bytes());
        chunk[8..16].copy_from_slice(&(block as u64).to_le_bytes());
    }
    fs::write(to, bytes)?;
    Ok(())
}

/// What `split -a 4` calls its n-th file.
fn name(n: usize) -> String {
    let letter = |at: u32| char::from(b'a' + (n / 26usize.pow(at) % 26) as u8);
    (0..4)
        .rev()
        .map(letter)
        .fold("x".to_owned(), |mut name, l| {
            name.push(l);
            name
        })
}

/// The program that looks at pages until it is told to stop.
fn program(pause: &str) -> String {
    format!(
        "n=0; bad=0; worst=0; while :; do for i in $(seq 0 {last}); do [ -e /run/stop ] && break 2; \
         read a _ </proc/uptime; s=$(dd if=/dev/shm/t bs=1M skip=$i count=1 2>/dev/null | cksum); read b _ </proc/uptime; \
         [ \"$s\" = \"$(sed -n $((i+1))p /run/sums)\" ] || bad=$((bad+1)); n=$((n+1)); \
         d=$(( ${{b%.*}}${{b#*.}} - ${{a%.*}}${{a#*.}} )); [ $d -gt $worst ] && worst=$d; sleep {pause}; done; done; echo $n $bad $worst",
        last = TOUCH_MIB - 1
    )
}

impl Guest {
    /// Powers one on.
    pub fn power_on(dir: &Path, number: usize, balloon: bool) -> Result<Guest> {
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let data = dir.join(format!("data.{number}"));
        let mut plan = Plan::new(1)
            .own_root()?
            .image(&data)
            .reached_at(address, 80);
        plan.memory = "512M".into();
        plan.wrap = Group::wrap();
        if balloon {
            plan = plan.balloon(&socket(dir, number));
        }
        Ok(Guest {
            machine: Machine::power_on(dir, &format!("g{number}"), &plan)?,
            number,
            address,
            data,
            touching: None,
        })
    }

    /// What it does first: network, data into memory, the web server.
    pub fn prepare(&mut self, balloon: bool) -> Result<Job> {
        let modules = if balloon {
            "modprobe virtio_balloon;"
        } else {
            ""
        };
        self.machine.start(&format!(
            "{modules} modprobe virtio_net && ip link set lo up && ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && \
             mkdir -p /dev/shm/w && mount -o remount,size=90% /dev/shm && cd /dev/shm/w && \
             dd if=/dev/vdb bs=1M count={WEB_MIB} 2>/dev/null | split -a 4 -b {FILE} && \
             dd if=/dev/vdb of=/dev/shm/t bs=1M skip={WEB_MIB} count={TOUCH_MIB} 2>/dev/null && \
             echo 1 >/proc/sys/vm/drop_caches && \
             for i in $(seq 0 {last}); do dd if=/dev/shm/t bs=1M skip=$i count=1 2>/dev/null | cksum; done >/run/sums && \
             dd if=/dev/vdb bs=1M skip={WEB_MIB} count={TOUCH_MIB} 2>/dev/null | cmp - /dev/shm/t && \
             httpd -p 80 -h /dev/shm/w",
            last = TOUCH_MIB - 1
        ))
    }

    /// Starts the program, with short pauses.
    pub fn touch(&mut self) -> Result<()> {
        self.touching = Some(self.machine.start(&program("0.2"))?);
        Ok(())
    }

    /// Tells the program to end.
    pub fn stop_touching(&mut self) -> Result<()> {
        self.machine.start("touch /run/stop").map(drop)
    }

    /// What the program saw; `None` if the guest does not come round until then.
    pub fn touched(&mut self, until: Instant) -> Result<Option<Touched>> {
        let Some(job) = self.touching.take() else {
            return Ok(None);
        };
        while !self.machine.has_ended(&job)? {
            if Instant::now() > until {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let text = self.machine.wait_ok(&job)?;
        let fields: Vec<u64> = text
            .split_whitespace()
            .filter_map(|w| w.parse().ok())
            .collect();
        let [chunks, wrong, worst] = fields[..] else {
            anyhow::bail!("guest {} said {text:?}", self.number)
        };
        Ok(Some(Touched {
            chunks,
            wrong,
            longest: worst as f64 / 100.0,
        }))
    }
}

/// Where a guest's balloon is moved.
pub fn socket(dir: &Path, number: usize) -> PathBuf {
    dir.join(format!("m{number}"))
}

/// What somebody who asks a web server saw.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// Milliseconds from a request to its answer.
    pub latencies: Vec<f64>,
    /// Answers that were not what is in the guest.
    pub wrong: u64,
    /// Requests that had no answer when the time was over; their waiting is counted.
    pub unanswered: u64,
    /// Connections that were refused or ended early.
    pub failed: u64,
}

/// Of a guest's memory, what four fifths of the requests and the program use.
pub fn active_share(assigned: u64) -> f64 {
    (((WEB_MIB / 5 + TOUCH_MIB) << 20) as f64) / assigned as f64
}

/// Asks one request after the other without a pause, four fifths of the time for a fifth of the
/// files, until told to stop.
pub fn ask(address: SocketAddr, data: &Path, seed: u64, stop: &Arc<AtomicBool>) -> Result<Asked> {
    let data = File::open(data)?;
    let files = (WEB_MIB << 20) / FILE;
    let mut rng = Rng::new(seed);
    let mut asked = Asked::default();
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let hot = rng.below(100) < 80;
        let among = if hot { files / 5 } else { files };
        let n = rng.below(among as u64) as usize;
        match get(address, &name(n), stop) {
            Ok(Some(body)) => {
                let mut expected = vec![0; FILE];
                data.read_exact_at(&mut expected, (n * FILE) as u64)?;
                asked.wrong += u64::from(body != expected);
            }
            Ok(None) => asked.unanswered += 1,
            Err(_) => {
                asked.failed += 1;
                // A guest that refuses at once is not asked a thousand times a second.
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        asked.latencies.push(began.elapsed().as_secs_f64() * 1e3);
    }
    Ok(asked)
}

/// One answer; `None` if told to stop while waiting.
fn get(address: SocketAddr, name: &str, stop: &AtomicBool) -> Result<Option<Vec<u8>>> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_millis(100)))?;
    write!(stream, "GET /{name} HTTP/1.0\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut chunk = vec![0; FILE];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => answer.extend_from_slice(&chunk[..n]),
            Err(e)
                if matches!(
                    e.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                ) =>
            {
                if stop.load(Ordering::Relaxed) {
                    return Ok(None);
                }
            }
            Err(e) => return Err(e.into()),
        }
    }
    let end = answer
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .context("no head")?;
    ensure!(
        answer.starts_with(b"HTTP/1.") && answer.get(9..12) == Some(b"200"),
        "refused"
    );
    Ok(Some(answer.split_off(end + 4)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_called_as_split_calls_them() {
        assert_eq!(name(0), "xaaaa");
        assert_eq!(name(27), "xaabb");
        assert_eq!(name(26 * 26), "xabaa");
    }
}
