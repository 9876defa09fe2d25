//! The grammar of `hearth serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use hearth_daemon::daemon::Endurance;
use hearth_daemon::size;
use hearth_fault::Fault;

use super::trace::{parse_duration, span};
use super::{Size, parse_size};

fn parse_endurance(text: &str) -> Result<Endurance, Fault> {
    if let Some(number) = text.strip_suffix("dwpd") {
        let thousandths = number.trim().parse::<f64>().ok().map(|n| n * 1000.0);
        return match thousandths {
            Some(n) if (1.0..=1e6).contains(&n) => {
                Ok(Endurance::DriveWritesPerDay(n.round() as u64))
            }
            _ => Err(Fault::new(
                format!("“{text}” is no number of drive writes per day"),
                "give 0.001dwpd to 1000dwpd",
            )),
        };
    }
    match text.strip_suffix("/s").map(size::parse) {
        Some(Ok(bytes)) if bytes > 0 => Ok(Endurance::BytesPerSecond(bytes)),
        Some(Err(e)) => Err(e.fault()),
        _ => Err(Fault::new(
            format!("“{text}” is no endurance"),
            "give drive writes per day (0.3dwpd) or a rate (5M/s)",
        )),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Tls {
    /// No encryption
    Off,
    /// A client may encrypt
    Allowed,
    /// A client must encrypt
    Required,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LockMemory {
    /// If it may be locked without a limit
    Auto,
    /// No
    Off,
    /// Or do not start
    Required,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object a line
    Json,
}

/// Whole seconds, up to a day.
fn parse_flash_timeout(text: &str) -> Result<u64, Fault> {
    match span(text) {
        Some(seconds) if seconds <= 86_400.0 && seconds.fract() == 0.0 => Ok(seconds as u64),
        _ => Err(Fault::new(
            format!("“{text}” is no time that flash may take"),
            "give whole seconds up to a day, such as 30s or 2m, or 0",
        )),
    }
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example:\n  hearth serve --flash /dev/nvme0n1p4\n  \
    hearth serve --flash ./flash --run-dir ./run --nbd-listen 127.0.0.1:10809\n\n\
    SIGTERM or Ctrl-C stops it cleanly; a second one at once (what was flushed is safe either way).")]
pub struct Serve {
    /// Block device or file of the pool; of several, each with --flash [default: what the host's settings name]
    #[arg(long, value_name = "PATH")]
    pub flash: Vec<PathBuf>,
    /// File of settings, whose keys are these options; what is typed wins over it
    /// [default: /etc/hearth/hearth.toml, unless --flash names a pool]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Serve NBD on this TCP address as well
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub nbd_listen: Option<SocketAddr>,
    /// Allow --nbd-listen to be reachable from other hosts
    #[arg(long, requires = "nbd_listen")]
    pub allow_remote: bool,
    /// Encryption of TCP connections [default: required with --tls-dir, else off]
    #[arg(long, value_enum)]
    pub tls: Option<Tls>,
    /// Directory with server-cert.pem, server-key.pem and, to verify clients, ca-cert.pem
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    #[command(flatten)]
    pub sockets: Sockets,
    /// Data threads [default: one per CPU, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=8))]
    pub threads: Option<u16>,
    /// Look for work up to so many microseconds before sleeping, while work keeps coming that
    /// soon: lower latency for more CPU time [default: 0, off]
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u64).range(0..=10_000))]
    pub poll: Option<u64>,
    /// Write dirty data to the origins at no more than so many bytes a second while nobody waits
    /// for it [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub destage_rate: Option<Size>,
    /// RAM for blocks read only once so far, at most; what is read again meanwhile never had to be
    /// written to flash. Less is taken while more would earn nothing [default: 1 % of the pool, at
    /// most 512 MiB and a quarter of what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub ram_stage: Option<Size>,
    /// Time that a flash device may take for an operation before that counts as failed, in whole seconds; 0: it is waited for
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_flash_timeout)]
    pub flash_timeout: u64,
    /// Do not read ahead of guests what they will ask for next. By default it is done for origins
    /// that take longer than 0.5 ms for a scattered read
    #[arg(long)]
    pub no_prefetch: bool,
    /// What may be written to flash in the long run, in drive writes a day (0.3dwpd) or bytes a
    /// second (5M/s): as it is used up, fewer reads are cached; writes are never refused
    /// [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = parse_endurance)]
    pub endurance: Option<Endurance>,
    /// Refuse to start if the index would need more RAM than this [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<Size>,
    /// Lock the daemon's own memory, so that it is never swapped out and guests never wait for that;
    /// guests' memory stays as it is
    #[arg(long, value_enum, default_value = "auto")]
    pub lock_memory: LockMemory,
    /// Directory in which the files below images may lie that --allow-backing lets through; may be
    /// given several times [default: the image's own]
    #[arg(long, value_name = "DIR")]
    pub backing_dir: Vec<PathBuf>,
    /// RAM for all NBD clients together: their connections, requests and replies
    /// [default: 40M, and 512K for each disk]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub nbd_memory: Option<Size>,
    /// Open a pool of whose log parts cannot be read, with what can be
    #[arg(long)]
    pub accept_damage: bool,
    /// Use the flash again, which Hearth leaves alone after it aborted three times within ten minutes
    #[arg(long)]
    pub release_brake: bool,
    /// If the cache is off because the file system under the flash file was full: end, with status 1, when
    /// there has been room for all of the file for so long (30s, 5m), so that a supervisor starts the
    /// daemon anew, with its cache [default: go on without it]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub exit_when_room: Option<f64>,
    /// Directory of what must outlive the flash: the keys of datastores, whose files clients know by them
    /// [default: /var/lib/hearth for root, $XDG_STATE_HOME/hearth for others]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Form of the log on standard error
    #[arg(long, value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// What to log: error, warn, info, debug, trace, or a filter such as hearth_engine=debug
    /// [default: info] [env: HEARTH_LOG]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
}

/// Who may use the sockets.
#[derive(Clone, Debug, Args)]
pub struct Sockets {
    /// Group that may use the disks: the NBD and vhost-user sockets [default for root: kvm, where
    /// there is such a group]
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
    /// Group that may control the daemon: add and remove disks, read statistics [default: nobody
    /// but root and the user who runs it]
    #[arg(long, value_name = "GROUP")]
    pub control_group: Option<String>,
    /// Group of the second service, `hearth monitor`: the socket with the calls that it makes [default: nobody
    /// but root and the user who runs it]
    #[arg(long, value_name = "GROUP")]
    pub monitor_group: Option<String>,
    /// Directory below which others than root may name files for disks, legs, flash and recordings, or device that they may name;
    /// may be given several times [default: none]
    #[arg(long, value_name = "PATH", value_parser = parse_allow_path)]
    pub allow_path: Vec<PathBuf>,
    /// Server (HOST or HOST:PORT) whose NBD exports others than root may name; may be given several times [default: none]
    #[arg(long, value_name = "HOST[:PORT]")]
    pub allow_server: Vec<String>,
}

fn parse_allow_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let checked = hearth_config::reach::check_paths([&path]);
    checked.map_err(|fault| format!("{}; {}", fault.what, fault.remedy))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endurance_is_a_share_or_a_rate() {
        let rate = |text| parse_endurance(text);
        assert_eq!(rate("0.3dwpd"), Ok(Endurance::DriveWritesPerDay(300)));
        assert_eq!(rate("5M/s"), Ok(Endurance::BytesPerSecond(5 << 20)));
        for bad in [
            "", "5M", "0/s", "dwpd", "-1dwpd", "NaNdwpd", "x/s", "1e9dwpd",
        ] {
            assert!(rate(bad).is_err(), "{bad:?}");
        }
    }
}
