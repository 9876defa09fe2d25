//! The command line's grammar. Scripts rely on its spelling; see `docs/cli.md`.

mod bench;

use std::net::SocketAddr;
use std::path::PathBuf;

pub use bench::{Bench, BenchCommand, BenchCompare, BenchTable};
use clap::{Args, Parser, Subcommand, ValueEnum};
use hearth_daemon::api::types::{CacheMode, Trust};
use hearth_daemon::daemon::Endurance;
use hearth_daemon::origin::ORIGIN_TIMEOUT;
use hearth_daemon::size;

/// A size in bytes, as `4K`, `512M` or `1.5G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

fn parse_size(text: &str) -> Result<Size, String> {
    size::parse(text).map(Size).map_err(|e| e.to_string())
}

fn parse_endurance(text: &str) -> Result<Endurance, String> {
    if let Some(number) = text.strip_suffix("dwpd") {
        let thousandths = number.trim().parse::<f64>().ok().map(|n| n * 1000.0);
        return match thousandths {
            Some(n) if (1.0..=1e6).contains(&n) => {
                Ok(Endurance::DriveWritesPerDay(n.round() as u64))
            }
            _ => Err("drive writes per day are from 0.001dwpd to 1000dwpd".to_owned()),
        };
    }
    match text.strip_suffix("/s").map(size::parse) {
        Some(Ok(bytes)) if bytes > 0 => Ok(Endurance::BytesPerSecond(bytes)),
        Some(Err(e)) => Err(e.to_string()),
        _ => Err("give drive writes per day (0.3dwpd) or a rate (5M/s)".to_owned()),
    }
}

/// Seconds to wait for an origin. JSON has no infinity, so the daemon would not see one.
fn parse_timeout(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(n) if ORIGIN_TIMEOUT.contains(&n) => Ok(n),
        _ => Err(format!(
            "give seconds from {} to {}, such as 30",
            ORIGIN_TIMEOUT.start(),
            ORIGIN_TIMEOUT.end()
        )),
    }
}

/// A flash cache for virtual-machine disks
#[derive(Debug, Parser)]
#[command(
    name = "hearth",
    version,
    about = "A flash cache for virtual-machine disks",
    disable_help_subcommand = true,
    after_help = "Example:\n  \
        hearth pool create --flash /var/lib/hearth/flash --size 100G\n  \
        hearth serve --flash /var/lib/hearth/flash &\n  \
        hearth disk add vm1 --origin /srv/vm1.raw\n  \
        qemu-system-x86_64 … -device virtio-blk-pci,drive=vm1 -blockdev \\\n    \
        driver=nbd,node-name=vm1,server.type=unix,server.path=/run/hearth/nbd.sock,export=vm1,reconnect-delay=60,discard=unmap\n\n\
        `hearth attach-help vm1 --for qemu` prints that for your disk and sockets."
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Clone, Debug, Args)]
pub struct Global {
    /// Directory of the daemon's sockets [default: /run/hearth for root, $XDG_RUNTIME_DIR/hearth for others] [env: HEARTH_RUN_DIR]
    // Not the parser's business: its usage lines show what the environment gives as if it had to be typed.
    #[arg(long, global = true, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long, global = true)]
    pub json: bool,
}

impl Global {
    /// The run directory, given or default.
    pub fn dir(&self) -> PathBuf {
        let env = || std::env::var_os("HEARTH_RUN_DIR").filter(|dir| !dir.is_empty());
        self.run_dir
            .clone()
            .or_else(|| env().map(PathBuf::from))
            .unwrap_or_else(hearth_daemon::rundir::default_dir)
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create, show, import or export a pool
    #[command(
        subcommand,
        after_help = "Example:\n  hearth pool create --flash /var/lib/hearth/flash --size 100G\n  hearth pool show"
    )]
    Pool(Pool),
    /// Serve a pool's disks in the foreground
    Serve(Serve),
    /// Add, show, change, flush or remove disks
    #[command(
        subcommand,
        after_help = "Example:\n  hearth disk add vm1 --origin /srv/vm1.raw\n  hearth disk show vm1\n  \
        hearth disk remove vm1"
    )]
    Disk(Disk),
    /// Show what the cache does
    Stats(Stats),
    /// Show what a guest does to a disk: request lengths, distances, latencies, queue depths
    Histogram(Histogram),
    /// Say what more or less flash would do for disks, and how to divide it
    Advise(Advise),
    /// Record, replay and convert traces, and sum them up
    #[command(
        subcommand,
        after_help = "Example:\n  hearth trace record vm1 --out vm1.trace --for 10m\n  hearth trace info vm1.trace"
    )]
    Trace(Trace),
    /// Try cache policies and sizes on traces
    Simulate(Simulate),
    /// Measure disks of your own before and after: the slow one, the cache, the flash
    Bench(Bench),
    /// Print what to type to give a disk to a virtual machine
    #[command(
        after_help = "Example:\n  hearth attach-help vm1 --for qemu\n  hearth attach-help vm1 --for libvirt --over nbd"
    )]
    AttachHelp(AttachHelp),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Hypervisor {
    /// Arguments for qemu-system-…
    Qemu,
    /// XML for a domain
    Libvirt,
    /// A command for Proxmox VE
    Proxmox,
}

impl Hypervisor {
    /// As it is typed.
    pub fn word(self) -> &'static str {
        match self {
            Hypervisor::Qemu => "qemu",
            Hypervisor::Libvirt => "libvirt",
            Hypervisor::Proxmox => "proxmox",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Over {
    /// Shared memory: the fastest
    VhostUser,
    /// A socket: an ordinary block node
    Nbd,
}

#[derive(Clone, Debug, Args)]
pub struct AttachHelp {
    /// The disk
    #[arg(value_name = "DISK")]
    pub name: String,
    /// The hypervisor
    #[arg(long = "for", value_enum, value_name = "HYPERVISOR")]
    pub hypervisor: Hypervisor,
    /// Only this way [default: every way the hypervisor has]
    #[arg(long, value_enum)]
    pub over: Option<Over>,
}

#[derive(Debug, Subcommand)]
pub enum Pool {
    /// Format flash as a new pool
    #[command(
        after_help = "Example:\n  hearth pool create --flash /dev/nvme0n1p4\n  \
        hearth pool create --flash /var/lib/hearth/flash --size 100G --label vmhost7"
    )]
    Create(PoolCreate),
    /// Show a pool: on flash, or the one being served
    #[command(
        after_help = "Example:\n  hearth pool show\n  hearth pool show --flash /dev/nvme0n1p4"
    )]
    Show(PoolAt),
    /// Check a pool brought from elsewhere, and make it ready to be served here
    #[command(after_help = "Example:\n  hearth pool import --flash /dev/nvme0n1p4")]
    Import(PoolAt),
    /// Write everything dirty to the origins, so that the pool can leave and the origins stand alone
    #[command(
        after_help = "Example:\n  hearth pool export\n  hearth pool export --yes\n  hearth pool export --flash /dev/nvme0n1p4"
    )]
    Export(PoolExport),
}

#[derive(Clone, Debug, Args)]
pub struct PoolCreate {
    /// Block device or file
    #[arg(long, required = true, value_name = "PATH")]
    pub flash: Vec<PathBuf>,
    /// Make a new file of this size
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: Option<Size>,
    /// With --size: only reserve the space instead of writing the file once; the first writes
    /// to the cache are slower then
    #[arg(long, requires = "size")]
    pub quick: bool,
    /// Overwrite what is there: a file system, a partition table, another pool, an existing file;
    /// and allow a file in RAM
    #[arg(long)]
    pub force: bool,
    /// A name for the pool, for people
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub label: String,
}

#[derive(Clone, Debug, Args)]
pub struct PoolAt {
    /// Block device or file of a pool that is not being served
    #[arg(long, value_name = "PATH")]
    pub flash: Vec<PathBuf>,
}

#[derive(Clone, Debug, Args)]
pub struct PoolExport {
    #[command(flatten)]
    pub at: PoolAt,
    /// Yes, cut off clients that are connected
    #[arg(long)]
    pub yes: bool,
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
pub enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object a line
    Json,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example:\n  hearth serve --flash /dev/nvme0n1p4\n  \
    hearth serve --flash ./flash --run-dir ./run --nbd-listen 127.0.0.1:10809\n\n\
    SIGTERM or Ctrl-C stops it cleanly; a second one at once (what was flushed is safe either way).")]
pub struct Serve {
    /// Block device or file of the pool
    #[arg(long, required = true, value_name = "PATH")]
    pub flash: Vec<PathBuf>,
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
    pub sockets: crate::args_sockets::Sockets,
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
    /// RAM for blocks read only once so far; what is read again meanwhile never had to be written
    /// to flash [default: 1 byte for each block of the pool, at least 1 MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub ram_stage: Option<Size>,
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
    /// Directory in which the files below images may lie that --allow-backing lets through; may be
    /// given several times [default: the image's own]
    #[arg(long, value_name = "DIR")]
    pub backing_dir: Vec<PathBuf>,
    /// RAM for all NBD clients together: their connections, requests and replies
    /// [default: a sixteenth of the machine's, at least 128M, at most 1G]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub nbd_memory: Option<Size>,
    /// Open a pool of whose log parts cannot be read, with what can be
    #[arg(long)]
    pub accept_damage: bool,
    /// Use the flash again, which Hearth leaves alone after it aborted three times within ten minutes
    #[arg(long)]
    pub release_brake: bool,
    /// Form of the log on standard error
    #[arg(long, value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// What to log: error, warn, info, debug, trace, or a filter such as hearth_engine=debug
    /// [default: info] [env: HEARTH_LOG]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
}

impl Serve {
    /// The log's filter, given or default.
    pub fn log_filter(&self) -> String {
        let env = || std::env::var("HEARTH_LOG").ok();
        self.log
            .clone()
            .or_else(env)
            .unwrap_or_else(|| "info".to_owned())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Writes complete on flash and reach the origin later
    WriteBack,
    /// Writes complete on the origin; the flash copy is renewed
    WriteThrough,
    /// Reads are cached; writes go to the origin
    WriteAround,
    /// Pass-through
    Off,
}

impl From<Mode> for CacheMode {
    fn from(mode: Mode) -> CacheMode {
        match mode {
            Mode::WriteBack => CacheMode::WriteBack,
            Mode::WriteThrough => CacheMode::WriteThrough,
            Mode::WriteAround => CacheMode::WriteAround,
            Mode::Off => CacheMode::Off,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Side {
    /// The dirty blocks on flash are written over the origin
    Flash,
    /// The dirty blocks are thrown away
    Origin,
}

impl From<Side> for Trust {
    fn from(side: Side) -> Trust {
        match side {
            Side::Flash => Trust::Flash,
            Side::Origin => Trust::Origin,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Disk {
    /// Put a disk behind the cache; its data stays as it is
    #[command(
        after_help = "Example:\n  hearth disk add vm1 --origin /srv/vm1.raw\n  \
        hearth disk add db --origin /dev/vg0/db --mode write-through --block-size 16K --max 50G\n  \
        hearth disk add old --origin qcow2:/srv/old.qcow2\n  \
        hearth disk add clone --origin qcow2:/srv/clone.qcow2 --allow-backing\n  \
        hearth disk add mail --origin nbd://storage1/mail --sole-user --origin-timeout 60"
    )]
    Add(DiskAdd),
    /// List the disks
    #[command(after_help = "Example:\n  hearth disk list")]
    List,
    /// Show one disk
    #[command(after_help = "Example:\n  hearth disk show vm1")]
    Show(DiskName),
    /// Change settings while the disk is in use
    #[command(
        after_help = "Example:\n  hearth disk set vm1 --mode write-through\n  \
        hearth disk set vm1 --size-from-origin\n  hearth disk set vm1 --trust flash"
    )]
    Set(DiskSet),
    /// Write everything dirty to the origin; Ctrl-C calls it off
    #[command(after_help = "Example:\n  hearth disk flush vm1")]
    Flush(DiskName),
    /// Flush a disk and forget it; the origin is the disk again. Ctrl-C calls it off
    #[command(after_help = "Example:\n  hearth disk remove vm1\n  hearth disk remove vm1 --yes")]
    Remove(DiskRemove),
    /// Give up ranges whose only copy was lost with the flash
    #[command(after_help = "Example:\n  hearth disk accept-loss vm1")]
    AcceptLoss(DiskName),
}

#[derive(Clone, Debug, Args)]
pub struct DiskName {
    /// The disk
    #[arg(value_name = "NAME")]
    pub name: String,
}

#[derive(Clone, Debug, Args)]
pub struct DiskAdd {
    /// Name of the disk, and of its NBD export
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Where the disk's data is: a file, a block device, an image as FORMAT:PATH or an NBD export (docs/origins.md)
    #[arg(long, value_name = "ORIGIN")]
    pub origin: String,
    /// Cache mode
    #[arg(long, value_enum, default_value = "write-back")]
    pub mode: Mode,
    /// Unit in which misses are filled, 4K to 1M [default: 4K]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub block_size: Option<Size>,
    /// Flash kept for this disk [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub min: Option<Size>,
    /// Most flash it may use [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub max: Option<Size>,
    /// Sequential reads longer than this are not cached; 0 caches all [default: 1M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub seq_cutoff: Option<Size>,
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    /// Let the flash kept for it follow the advice, between --min and --max
    #[arg(long)]
    pub auto: bool,
    /// Seconds that requests wait for an origin's server that is gone before they fail [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = parse_timeout)]
    pub origin_timeout: Option<f64>,
    /// Most clients at a time: processes, not connections; over TCP, hosts. 1 keeps a second virtual
    /// machine out, and live migration [default: 0, any number]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub clients: Option<u32>,
    /// Nobody but this pool writes the origin: for origins where that cannot be seen (nbd, iscsi, ssh, nfs://)
    #[arg(long)]
    pub sole_user: bool,
    /// Take the origin from the pool that owns it, if that shows no sign of life; needs --yes
    #[arg(long)]
    pub takeover: bool,
    /// Yes, what that pool had not written back may be missing
    #[arg(long, requires = "takeover")]
    pub yes: bool,
    /// The image may name other files of this host (a backing file, a data file, extents), as far as
    /// they lie beside it or in a --backing-dir of the daemon
    #[arg(long)]
    pub allow_backing: bool,
}

#[derive(Clone, Debug, Args)]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true)
    .args(["mode", "block_size", "min", "max", "seq_cutoff", "auto", "origin_timeout", "clients", "size_from_origin",
        "allow_backing", "trust", "sole_user", "takeover"]))]
pub struct DiskSet {
    /// The disk
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Cache mode
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Unit in which misses are filled, 4K to 1M
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub block_size: Option<Size>,
    /// Flash kept for this disk
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub min: Option<Size>,
    /// Most flash it may use; 0 for no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub max: Option<Size>,
    /// Sequential reads longer than this are not cached; 0 caches all
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub seq_cutoff: Option<Size>,
    /// Let the flash kept for it follow the advice, between --min and --max
    #[arg(long, value_enum)]
    pub auto: Option<Switch>,
    /// Seconds that requests wait for an origin's server that is gone before they fail
    #[arg(long, value_name = "SECONDS", value_parser = parse_timeout)]
    pub origin_timeout: Option<f64>,
    /// Most clients at a time: processes, not connections; over TCP, hosts. 1 keeps a second virtual
    /// machine out, and live migration [default: 0, any number]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub clients: Option<u32>,
    /// The origin has grown: take over its size
    #[arg(long)]
    pub size_from_origin: bool,
    /// The image may name the other files of this host that it names now
    #[arg(long)]
    pub allow_backing: bool,
    /// The origin was changed while dirty blocks waited: which side wins
    #[arg(long, value_enum, value_name = "SIDE")]
    pub trust: Option<Side>,
    /// Nobody but this pool writes the origin: for origins where that cannot be seen (nbd, iscsi, ssh, nfs://)
    #[arg(long)]
    pub sole_user: bool,
    /// Take the origin from the pool that owns it, if that shows no sign of life; needs --yes
    #[arg(long)]
    pub takeover: bool,
    /// Yes, what that pool had not written back may be missing
    #[arg(long, requires = "takeover")]
    pub yes: bool,
}

#[derive(Clone, Debug, Args)]
pub struct DiskRemove {
    /// The disk
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Throw dirty blocks away instead of writing them to the origin; needs --yes
    #[arg(long, visible_alias = "force")]
    pub discard_dirty: bool,
    /// Yes, cut off clients that are connected; with --discard-dirty, lose the newest writes
    #[arg(long)]
    pub yes: bool,
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth stats\n  hearth stats vm1 --watch\n\n\
    Every number is defined in docs/statistics.md."
)]
pub struct Stats {
    /// Only this disk
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Show again every second until Ctrl-C
    #[arg(long)]
    pub watch: bool,
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth histogram vm1\n  hearth histogram vm1 --csv --reset > vm1.csv\n\n\
    The sixteen histograms of ESXi's vscsiStats, with its limits; --csv is its CSV. What the guest\n\
    sent is counted, before the cache."
)]
pub struct Histogram {
    /// The disk
    #[arg(value_name = "DISK")]
    pub name: String,
    /// Print vscsiStats' CSV
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
    /// Begin anew after this; nothing between print and reset is lost
    #[arg(long)]
    pub reset: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes
    On,
    /// No
    Off,
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth advise\n  hearth advise vm1 --svg vm1.svg\n  hearth advise --apply\n  hearth advise --auto on\n\n\
    The curve is that of an LRU cache, measured on a sample of the disk's live requests; see docs/workload.md."
)]
pub struct Advise {
    /// Only this disk
    #[arg(value_name = "DISK")]
    pub name: Option<String>,
    /// Keep for each disk the flash advised, until the daemon stops
    #[arg(long)]
    pub apply: bool,
    /// From now on, let the flash kept for these disks follow the advice, or no longer
    #[arg(long, value_enum, conflicts_with = "apply")]
    pub auto: Option<Switch>,
    /// Draw the curves into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum Trace {
    /// Record every request of a live disk
    #[command(
        after_help = "Example:\n  hearth trace record vm1 --out vm1.trace --for 10m\n  \
        hearth trace record vm1 --out vm1.trace --max-size 200M\n  hearth trace record vm1 --stop\n\n\
        With --for it waits for the end (Ctrl-C ends the recording); without, it returns at once."
    )]
    Record(TraceRecord),
    /// Send a trace's requests to a disk again, and measure it
    #[command(
        after_help = "Example:\n  hearth trace replay vm1.trace --to 'nbd+unix:///scratch?socket=/run/hearth/nbd.sock' --overwrite\n  \
        hearth trace replay vm1.trace --to /dev/vg0/scratch --overwrite --flat-out --verify\n  \
        hearth trace replay vm1.trace --to nbd://host/disk --reads-only --speed 2\n\n\
        Without --depth or --flat-out requests go out when they did in the trace. Ctrl-C ends it and shows\n\
        what was measured so far. Fails if a request failed or read wrong data."
    )]
    Replay(TraceReplay),
    /// Write a trace in another form
    #[command(
        after_help = "Example:\n  hearth trace convert hm_1.csv.gz hm_1.hearth\n  \
        hearth trace convert vm.vscsi vm.csv\n  \
        hearth trace convert vm1.trace vm1.msr.csv --to msr\n\n\
        What a form has no place for is left out and counted; docs/cli.md says what each loses."
    )]
    Convert(TraceConvert),
    /// Sum a trace up: requests, working set, reuse, sizes, seeks, and how they spread over time
    #[command(
        after_help = "Example:\n  hearth trace info hm_1.csv.gz\n  hearth trace info vm.vscsi --json"
    )]
    Info(TraceInfo),
}

/// A trace's form.
fn parse_format(text: &str) -> Result<hearth_trace::Format, String> {
    text.parse()
        .map_err(|e: hearth_trace::TraceError| e.to_string())
}

/// A form to write.
fn parse_output(text: &str) -> Result<hearth_trace::Format, String> {
    match parse_format(text)? {
        hearth_trace::Format::Keys => {
            Err("this form is only read; choose another, such as csv".to_owned())
        }
        form => Ok(form),
    }
}

/// A time span in seconds, as `30`, `90s`, `10m`, `2h` or `1d`.
fn parse_duration(text: &str) -> Result<f64, String> {
    let (number, unit) = match text.chars().last() {
        Some('s') => (&text[..text.len() - 1], 1.0),
        Some('m') => (&text[..text.len() - 1], 60.0),
        Some('h') => (&text[..text.len() - 1], 3600.0),
        Some('d') => (&text[..text.len() - 1], 86_400.0),
        _ => (text, 1.0),
    };
    match number.parse::<f64>() {
        Ok(n) if n > 0.0 && n * unit < 1e10 => Ok(n * unit),
        _ => Err("give a number with s, m, h or d, such as 90s or 10m".to_owned()),
    }
}

#[derive(Clone, Debug, Args)]
pub struct TraceRecord {
    /// The disk
    #[arg(value_name = "DISK")]
    pub name: String,
    /// File to make; older requests go to FILE.1 when it gets too long
    #[arg(long, value_name = "FILE", required_unless_present = "stop")]
    pub out: Option<PathBuf>,
    /// Record so long, and wait for it, such as 90s, 10m, 2h
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration, conflicts_with = "stop")]
    pub duration: Option<f64>,
    /// Most both files may take; beyond, the oldest requests are given up [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "stop")]
    pub max_size: Option<Size>,
    /// End the recording under way
    #[arg(long, conflicts_with = "out")]
    pub stop: bool,
}

fn parse_speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(n) if (hearth_replay::SPEED_MIN..=1e6).contains(&n) => Ok(n),
        _ => Err("give a number from 0.001 to 1000000, such as 0.5 or 10".to_owned()),
    }
}

#[derive(Clone, Debug, Args)]
pub struct TraceReplay {
    /// The trace, in any form `hearth trace` reads
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// An NBD export, a file or a block device
    #[arg(long, value_name = "nbd+unix://…|nbd://…|PATH")]
    pub to: String,
    /// So many times faster than the trace [default: 1]
    #[arg(long, value_name = "X", value_parser = parse_speed, conflicts_with_all = ["depth", "flat_out"])]
    pub speed: Option<f64>,
    /// Keep so many requests in flight instead of the trace's timing
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), conflicts_with = "flat_out")]
    pub depth: Option<u16>,
    /// As fast as the target goes, 128 requests in flight
    #[arg(long)]
    pub flat_out: bool,
    /// Write data that says what it is, and check it whenever it is read, and once more at the end
    #[arg(long, conflicts_with = "reads_only")]
    pub verify: bool,
    /// The trace's writes may destroy what is on the target
    #[arg(long, conflicts_with = "reads_only")]
    pub overwrite: bool,
    /// Leave out everything but reads
    #[arg(long)]
    pub reads_only: bool,
    /// Fold a trace of a larger disk into the target
    #[arg(long)]
    pub wrap: bool,
    /// Only this disk of a trace with several, numbered from 0 in order of appearance
    #[arg(long, value_name = "N")]
    pub disk: Option<u32>,
    /// Form of the trace [default: found out]
    #[arg(long, value_name = "FORM", value_parser = parse_format)]
    pub format: Option<hearth_trace::Format>,
}

#[derive(Clone, Debug, Args)]
pub struct TraceConvert {
    /// The trace; compressed with gzip or zstd is fine, - is standard input
    #[arg(value_name = "FROM")]
    pub from: PathBuf,
    /// Where to write; - is standard output
    #[arg(value_name = "TO")]
    pub to: PathBuf,
    /// Form of FROM [default: found out]
    #[arg(long, value_name = "FORM", value_parser = parse_format)]
    pub format: Option<hearth_trace::Format>,
    /// Form to write: hearth, csv, msr, alibaba, spc, blkparse, vscsi1, vscsi2 or oracle-general
    /// [default: csv if TO ends in .csv, else hearth]
    #[arg(long = "to", value_name = "FORM", value_parser = parse_output)]
    pub output: Option<hearth_trace::Format>,
    /// Only this disk of a trace with several, numbered from 0 in order of appearance
    #[arg(long, value_name = "N")]
    pub disk: Option<u32>,
}

#[derive(Clone, Debug, Args)]
pub struct TraceInfo {
    /// The trace
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// Its form [default: found out]
    #[arg(long, value_name = "FORM", value_parser = parse_format)]
    pub format: Option<hearth_trace::Format>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WriteTo {
    /// Written blocks go on flash by their merit; the origin has them
    WriteThrough,
    /// Every write goes on flash at once
    WriteBack,
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth simulate hm_1.csv.gz --size 1%,5%,10%,20%,40% --policy all\n  \
    hearth simulate a.hearth b.hearth --size 50G --policy hearth,lru,arc --svg curves.svg\n\n\
    Hits of prefetched blocks are counted as hits and shown apart: the simulator has no disk, so\n\
    it takes what is read ahead to be there after --prefetch-latency."
)]
pub struct Simulate {
    /// Traces in any form `hearth trace` reads
    #[arg(value_name = "TRACE", required = true)]
    pub traces: Vec<PathBuf>,
    /// Form of the traces [default: found out]
    #[arg(long, value_name = "FORM", value_parser = parse_format)]
    pub format: Option<hearth_trace::Format>,
    /// Cache sizes: shares of a trace's working set (5%) or sizes (20G)
    #[arg(
        long,
        value_name = "SIZE,...",
        value_delimiter = ',',
        default_value = "1%,5%,10%,20%,40%"
    )]
    pub size: Vec<String>,
    /// Policies: all, hearth, hearth-demand (without prefetch), lru, 2q, arc, lirs, w-tinylfu,
    /// s3-fifo, sieve, opt (knows the future)
    #[arg(
        long,
        value_name = "NAME,...",
        value_delimiter = ',',
        default_value = "all"
    )]
    pub policy: Vec<String>,
    /// What hearth does with written blocks; the other policies always renew flash
    #[arg(long, value_enum, default_value = "write-through")]
    pub write_mode: WriteTo,
    /// What hearth may write to flash, per second in the long run [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub flash_rate: Option<Size>,
    /// Time a prefetched block takes to arrive, microseconds of the trace's time; asked for
    /// earlier, it counts as a miss
    #[arg(long, value_name = "US", default_value_t = 0)]
    pub prefetch_latency: u64,
    /// Count hits in so many equal parts of the trace too
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub parts: u16,
    /// Draw hit ratio over size into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Threads [default: one per CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

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

    #[test]
    fn grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn spelling_scripts_rely_on() {
        for line in [
            "hearth pool create --flash /a --flash /b --size 10G --force --label x",
            "hearth pool show",
            "hearth pool show --flash /a",
            "hearth pool import --flash /a",
            "hearth pool export",
            "hearth serve --flash /a --run-dir /r",
            "hearth serve --flash /a --nbd-listen 127.0.0.1:10809 --tls-dir /t --tls required --threads 2 --memory 1G",
            "hearth serve --flash /a --nbd-listen 0.0.0.0:10809 --allow-remote --log-format json",
            "hearth --run-dir /r disk add vm --origin /o --mode write-around --block-size 64K --min 1G --max 2G",
            "hearth disk add vm --origin model-hdd:/o --seq-cutoff 4M --read-only",
            "hearth disk list --json",
            "hearth disk show vm --run-dir /r",
            "hearth disk set vm --mode off --min 0 --max 0",
            "hearth disk set vm --size-from-origin",
            "hearth disk set vm --trust origin",
            "hearth disk flush vm",
            "hearth disk remove vm",
            "hearth disk remove vm --yes",
            "hearth disk set vm --clients 1",
            "hearth pool export --yes",
            "hearth disk remove vm --discard-dirty --yes",
            "hearth disk remove vm --force --yes",
            "hearth disk accept-loss vm",
            "hearth stats",
            "hearth stats vm --watch --json",
            "hearth advise",
            "hearth advise vm --svg f --json",
            "hearth advise --apply",
            "hearth advise vm --auto off",
            "hearth disk set vm --auto on",
            "hearth histogram vm",
            "hearth histogram vm --csv --reset",
            "hearth histogram vm --json",
            "hearth trace record vm --out f --for 10m --max-size 200M",
            "hearth trace record vm --stop --json",
            "hearth trace replay t --to /dev/x --overwrite --verify --flat-out",
            "hearth trace replay t --to nbd://h/x --reads-only --speed 0.5 --disk 1 --wrap --format msr",
            "hearth trace replay t --to nbd://h/x --overwrite --depth 32 --json",
            "hearth trace convert a.csv.gz b.hearth",
            "hearth trace convert a b --format msr --to csv --disk 2",
            "hearth trace convert a b --to oracle-general",
            "hearth trace info a --format spc --json",
            "hearth simulate a b --size 1%,20G --policy all --svg c.svg --parts 10 --threads 2",
            "hearth bench",
            "hearth bench --slow /srv --flash /mnt/ssd --out /tmp/r --table random,fileio --over nbd",
            "hearth bench --quick --mode write-back,write-around --depth 1,24 --rounds 5 --seconds 3 --size 1G --json",
            "hearth bench --table storm --guest /g --storms 3",
            "hearth bench compare a.json b.json --json",
            "hearth simulate a --policy hearth,lru --write-mode write-back --prefetch-latency 8000 --flash-rate 20M --format csv",
        ] {
            if let Err(e) = parse(line) {
                panic!("{line}: {e}");
            }
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for line in [
            "hearth",
            "hearth serve",
            "hearth serve --flash /a --allow-remote",
            "hearth serve --flash /a --threads 0",
            "hearth pool create",
            "hearth pool create --flash /a --size 10GB",
            "hearth disk add vm",
            "hearth disk add vm --origin /o --mode writeback",
            "hearth disk set vm",
            "hearth disk add vm --origin /o --origin-timeout nan",
            "hearth disk add vm --origin /o --origin-timeout 0.4",
            "hearth disk set vm --origin-timeout inf",
            "hearth disk set vm --origin-timeout 86401",
            "hearth trace info",
            "hearth trace record vm",
            "hearth trace replay t",
            "hearth trace replay t --to x --speed 0",
            "hearth trace replay t --to x --speed 1e-9",
            "hearth trace replay t --to x --speed 2 --depth 3",
            "hearth trace record vm --out f --for 10x",
            "hearth trace record vm --out f --stop",
            "hearth histogram vm --csv --json",
            "hearth bench --depth 0",
            "hearth bench --table nonsense",
            "hearth bench compare a.json",
            "hearth bench --quick compare a.json b.json",
            "hearth trace info a --format nonsense",
            "hearth trace convert a b --to keys",
            "hearth simulate",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn every_command_has_an_example() {
        fn walk(command: &clap::Command) {
            let help = command
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(
                help.contains("Example:"),
                "{} has no example",
                command.get_name()
            );
            command.get_subcommands().for_each(walk);
        }
        walk(&Cli::command());
    }

    #[test]
    fn the_first_example_survives_a_restart_of_the_daemon() {
        let help = Cli::command().get_after_help().map(ToString::to_string);
        assert!(help.is_some_and(|h| h.contains("reconnect-delay=")));
    }

    #[test]
    fn the_manual_names_every_option() {
        let manual = include_str!("../../../docs/cli.md");
        fn walk(command: &clap::Command, manual: &str) {
            for arg in command.get_arguments() {
                if let Some(long) = arg.get_long().filter(|l| !["help", "version"].contains(l)) {
                    assert!(
                        manual.contains(&format!("--{long}")),
                        "docs/cli.md does not mention --{long}"
                    );
                }
            }
            command.get_subcommands().for_each(|c| walk(c, manual));
        }
        walk(&Cli::command(), manual);
    }
}
