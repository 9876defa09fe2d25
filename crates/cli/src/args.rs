//! The command line's grammar. Scripts rely on its spelling; see `docs/cli.md`.

mod bench;
mod config;
mod console;
mod datastore;
mod disk;
mod memory;
mod monitor;
mod pool;
mod rescue;
mod serve;
mod settings;
mod simulate;
mod swap;
mod trace;

use std::path::PathBuf;

pub use bench::{Bench, BenchCommand, BenchCompare, BenchTable};
use clap::{Args, Parser, Subcommand, ValueEnum};
pub use config::{Config, ConfigCheck};
pub use console::{Console, ConsoleAccount, ConsoleEnable, ConsoleOpen, ConsoleRole, StateDir};
pub use datastore::{Datastore, DatastoreAdd, DatastoreScrub, DatastoreSet};
pub use disk::{
    Disk, DiskAdd, DiskMirror, DiskMove, DiskRemove, DiskReplace, DiskScrub, DiskSet, Mode, Switch,
    Users,
};
use hearth_daemon::size;
use hearth_fault::Fault;
pub use memory::{Memory, MemoryEvents, MemoryHost, MemoryRun};
pub use monitor::{Alert, Monitor};
pub use pool::{
    FlashAdd, FlashNew, FlashRemove, FlashReplace, FlashWhere, Pool, PoolAdopt, PoolCreate,
    PoolExport, PoolImport, PoolShow,
};
pub use rescue::Rescue;
pub use serve::{LockMemory, LogFormat, Serve, Tls};
pub use settings::Settings;
pub use simulate::{Log, Simulate, WriteTo};
pub use swap::{Discard, Swap, SwapOn, SwapState};
pub use trace::{Trace, TraceConvert, TraceInfo, TraceRecord, TraceReplay};

/// A size in bytes, as `4K`, `512M` or `1.5G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

fn parse_size(text: &str) -> Result<Size, Fault> {
    size::parse(text).map(Size).map_err(|e| e.fault())
}

/// A flash cache for virtual-machine disks
#[derive(Debug, Parser)]
#[command(
    name = "hearth",
    version,
    about = "A flash cache for virtual-machine disks",
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
    /// Watch the daemon in a second process, which mails, shows and remembers
    Monitor(Monitor),
    /// Show on one screen how everything is
    #[command(after_help = "Example:\n  hearth status\n  hearth status --json\n\n\
            Exit status: 1 if health is failed or the daemon cannot be asked, otherwise 0.")]
    Status,
    /// Say in one line how everything is, for monitoring programs
    #[command(after_help = "Example:\n  hearth health\n  hearth health --json\n\n\
            A plugin for Nagios, Icinga, Checkmk and the like: exit status 0 OK, 1 WARNING (degraded, rebuilding),\n\
            2 CRITICAL (failed), 3 UNKNOWN.")]
    Health,
    /// Write the names of disks or datastores, for completions of shells
    #[command(hide = true, after_help = "Example:\n  hearth names disk")]
    Names(Names),
    /// Show what is wrong and was told, or try whether alerts arrive
    #[command(
        subcommand,
        after_help = "Example:\n  hearth alert list\n  hearth alert test"
    )]
    Alert(Alert),
    /// Add, show, change, flush or remove disks
    #[command(
        subcommand,
        after_help = "Example:\n  hearth disk add vm1 --origin /srv/vm1.raw\n  hearth disk show vm1\n  \
        hearth disk remove vm1"
    )]
    Disk(Disk),
    /// Serve directories of virtual machines over NFS
    #[command(
        subcommand,
        after_help = "Example:\n  hearth datastore add /srv/vms --nfs\n  hearth datastore list\n  \
        hearth datastore remove vms"
    )]
    Datastore(Datastore),
    /// Swap of this host on the flash
    #[command(
        subcommand,
        after_help = "Example:\n  hearth swap on --size 8G\n  hearth swap show\n  hearth swap off\n\n\
            What it is worth, and what it means if the flash dies: docs/memory.md."
    )]
    Swap(Swap),
    /// Run more machines than fit into memory: see, plan, and have memory taken back in the right order
    #[command(
        subcommand,
        after_help = "Example:\n  hearth memory plan\n  hearth memory status\n  systemctl enable --now hearth-memory\n\n\
            What is taken from whom, and when to buy RAM instead: docs/memory.md."
    )]
    Memory(Memory),
    /// Get what is dirty off a pool that nobody serves: read-only, also from damaged flash
    Rescue(Rescue),
    /// Show what the cache does
    Stats(Stats),
    /// Watch what disks do, live, in the terminal
    Top(Top),
    /// Show what happened
    Events(Events),
    /// Print all figures for Prometheus, or answer its scrapes
    Metrics(Metrics),
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
    /// The settings of this host
    #[command(
        subcommand,
        after_help = "Example:\n  hearth config check\n\nThe settings are in /etc/hearth/hearth.toml; see docs/cli.md."
    )]
    Config(Config),
    /// Have another program, mostly a newer version, take the daemon's place under its clients
    Upgrade(Upgrade),
    /// Say whether this program could take the place of a daemon with these arguments
    #[command(hide = true, name = hearth_daemon::upgrade::probe::COMMAND)]
    CanTakeOver(CanTakeOver),
    /// Write manual pages and completions, for packages
    #[command(hide = true)]
    Generate(Generate),
    /// Watch and change all this in a browser
    #[command(
        subcommand,
        after_help = "Example:\n  hearth console enable\n  hearth console open"
    )]
    Console(Console),
    /// Print what to type to give a disk to a virtual machine, or to mount a datastore
    #[command(
        after_help = "Example:\n  hearth attach-help vm1 --for qemu\n  hearth attach-help vm1 --for libvirt --over nbd\n  hearth attach-help vms --for esxi"
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
    /// A datastore: the command for an ESXi host
    Esxi,
    /// A datastore: the command that mounts it
    Linux,
}

impl Hypervisor {
    /// As it is typed.
    pub fn word(self) -> &'static str {
        match self {
            Hypervisor::Qemu => "qemu",
            Hypervisor::Libvirt => "libvirt",
            Hypervisor::Proxmox => "proxmox",
            Hypervisor::Esxi => "esxi",
            Hypervisor::Linux => "linux",
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
#[command(
    after_help = "Example:\n  hearth upgrade --check\n  hearth upgrade\n  hearth upgrade --program /opt/hearth-next/hearth --yes\n\n\
    NBD clients keep their connections and notice a pause, which is printed. Guests over vhost-user and\n\
    clients through TLS have to connect again, and are named before. See docs/upgrade.md."
)]
pub struct Upgrade {
    /// The program that takes over [default: this one]
    #[arg(long, value_name = "PATH")]
    pub program: Option<PathBuf>,
    /// Also if clients are named that have to connect again
    #[arg(long)]
    pub yes: bool,
    /// Only say whether it could, and who would have to connect again
    #[arg(long, conflicts_with = "yes")]
    pub check: bool,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example:\n  hearth can-take-over -- serve --flash /dev/nvme0n1p4")]
pub struct CanTakeOver {
    /// The daemon's arguments
    #[arg(last = true, required = true, value_name = "ARGUMENT")]
    pub args: Vec<std::ffi::OsString>,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example:\n  hearth generate ./made")]
pub struct Generate {
    /// Where to
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// What names are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Named {
    /// Disks
    Disk,
    /// Datastores
    Datastore,
    /// Both
    Any,
}

#[derive(Clone, Debug, Args)]
pub struct Names {
    /// Of what
    #[arg(value_enum, value_name = "KIND")]
    pub kind: Named,
}

#[derive(Clone, Debug, Args)]
pub struct AttachHelp {
    /// The disk or datastore
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The hypervisor; esxi and linux are for datastores
    #[arg(long = "for", value_enum, value_name = "HYPERVISOR")]
    pub hypervisor: Hypervisor,
    /// Only this way [default: every way the hypervisor has]
    #[arg(long, value_enum)]
    pub over: Option<Over>,
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth stats\n  hearth stats vm1 --watch\n  hearth stats --since 24h\n\n\
    Every number is defined in docs/statistics.md."
)]
pub struct Stats {
    /// Only this disk
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Show again every second until Ctrl-C
    #[arg(long)]
    pub watch: bool,
    /// What happened in the last so long, over restarts of the daemon: 30m, 24h, 90d. The second service keeps it
    #[arg(long, value_name = "DURATION", value_parser = trace::parse_duration, conflicts_with = "watch")]
    pub since: Option<f64>,
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth top\n  hearth top --interval 5\n  hearth top --json --once\n\n\
    Keys are shown at the bottom of the screen. With --json, one object a line until Ctrl-C."
)]
pub struct Top {
    /// Time between two looks
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_interval)]
    pub interval: f64,
    /// With --json: print one sample, and end
    #[arg(long)]
    pub once: bool,
}

fn parse_interval(text: &str) -> Result<f64, Fault> {
    match trace::parse_duration(text) {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        Ok(_) => Err(Fault::new(
            format!("“{text}” is no interval"),
            "give 100ms to 1h",
        )),
        Err(fault) => Err(fault),
    }
}

/// How much an event matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Severity {
    /// All of them
    Info,
    /// What somebody may want to know
    Notice,
    /// What may right itself
    Warning,
    /// What somebody has to see to
    Error,
}

impl Severity {
    /// As it is typed.
    pub fn word(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::Notice => "notice",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth events --since 2h\n  hearth events --disk vm1 --follow\n\n\
    Kinds and their names are listed in docs/events.md. With --json, one object a line."
)]
pub struct Events {
    /// Only this disk's
    #[arg(long, value_name = "NAME")]
    pub disk: Option<String>,
    /// Only the last so long: 90s, 10m, 2h, 7d
    #[arg(long, value_name = "DURATION", value_parser = trace::parse_duration)]
    pub since: Option<f64>,
    /// At least so severe
    #[arg(long, value_enum)]
    pub severity: Option<Severity>,
    /// So many at most, the newest
    #[arg(long, value_name = "N", default_value = "1000", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// Go on with what happens, until Ctrl-C
    #[arg(long)]
    pub follow: bool,
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth metrics\n  hearth metrics --listen 127.0.0.1:9810\n\n\
    The figures are listed in docs/metrics.md."
)]
pub struct Metrics {
    /// Answer `GET /metrics` on this TCP address until Ctrl-C
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<std::net::SocketAddr>,
    /// Allow --listen to be reachable from other hosts: names of disks and what they do are told to
    /// whoever asks
    #[arg(long, requires = "listen")]
    pub allow_remote: bool,
    /// Further name of this host that clients may use in the Host header; can be repeated
    #[arg(long = "name", value_name = "NAME", requires = "listen")]
    pub names: Vec<String>,
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

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth advise\n  hearth advise vm1 --svg vm1.svg\n  hearth advise vms/web/web-flat.vmdk\n  hearth advise --apply\n  hearth advise --auto on\n\n\
    The curve is that of an LRU cache, measured on a sample of the disk's live requests; see docs/workload.md."
)]
pub struct Advise {
    /// Only this disk, or this file of a datastore; with nothing behind the /, all files of it that were used lately
    #[arg(value_name = "DISK|DATASTORE/[FILE]")]
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    /// What is always refused is not offered.
    #[test]
    fn files_of_a_datastore_have_no_ordered_mode() {
        let set = |mode| {
            parse(&format!(
                "hearth datastore set vms --match *.raw --mode {mode}"
            ))
        };
        for mode in ["write-back", "write-through", "write-around", "off"] {
            assert!(set(mode).is_ok(), "{mode}");
        }
        let error = set("write-back-ordered").unwrap_err().to_string();
        assert!(!error.contains("write-through, write-around, off, write-back-ordered"));
        assert!(
            error.contains("[possible values: write-back, write-through"),
            "{error}"
        );
        assert!(parse("hearth disk set vm --mode write-back-ordered").is_ok());
    }

    /// `--dirty-copies` is of what is dirty alone, and a pool that is not served lets devices go, too.
    #[test]
    fn help_of_pools_says_what_is_so() {
        let hearth = Cli::command();
        let pool = hearth.find_subcommand("pool").expect("it is there");
        let help = |name: &str| {
            let command = pool.find_subcommand(name).expect("it is there");
            let help = command.clone().render_help().to_string();
            // However it was wrapped.
            help.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let create = help("create");
        assert!(!create.contains("devices everything is"), "{create}");
        assert!(create.contains("devices dirty data is"), "{create}");
        assert!(help("remove-flash").contains("of one that is not"));
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
            "hearth serve --flash /a --exit-when-room 5m",
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
            "hearth disk scrub vm --rate 100M --no-wait",
            "hearth disk scrub vm --prefer /a --json",
            "hearth disk scrub vm --every 7",
            "hearth datastore add /srv/vms --nfs --name vms --listen 192.0.2.1:2049 --client 192.0.2.0/24=rw,root --client ::1",
            "hearth datastore add vms --nfs --read-only",
            "hearth datastore list --json",
            "hearth datastore show vms",
            "hearth datastore set vms --client 192.0.2.7=ro --read-only off",
            "hearth datastore flush vms",
            "hearth datastore remove vms",
            "hearth serve --flash /a --state-dir /s",
            "hearth serve --flash /a --lock-memory required",
            "hearth swap on --size 8G --flash /a --priority 7 --discard once --zswap",
            "hearth swap off",
            "hearth swap show --json",
            "hearth swap resume --state-dir /s",
            "hearth memory status --config /c --guest vm1=/run/vm1.qmp --guest vm2=/q --json",
            "hearth memory plan --cgroup /sys/fs/cgroup/machine.slice",
            "hearth memory run --state-dir /s --log debug --log-format json",
            "hearth memory undo --run-dir /r",
            "hearth memory events --since 2h --limit 20 --state-dir /s --json",
            "hearth config check",
            "hearth config check /etc/hearth/hearth.toml --json",
            "hearth serve",
            "hearth serve --config f --threads 2",
            "hearth metrics",
            "hearth metrics --listen 0.0.0.0:9810 --allow-remote",
            "hearth status --json",
            "hearth health",
            "hearth health --json",
            "hearth names disk",
            "hearth disk flush --all",
            "hearth disk flush vm --hold",
            "hearth disk flush --all --hold --json",
            "hearth top --interval 500ms",
            "hearth serve --flash /a --flash-timeout 1m",
            "hearth serve --flash /a --flash-timeout 0",
            "hearth disk set vm --origin-timeout 2m",
            "hearth disk set vm --max-age 1d",
            "hearth disk scrub vm --every 7d",
            "hearth disk scrub vm --every 0",
            "hearth datastore scrub vms --every 14d",
            "hearth alert list",
            "hearth alert test",
            "hearth alert failed u --config /c",
            "hearth monitor --config /c --state-dir /s --control-group g --log debug --log-format json",
            "hearth events",
            "hearth events --disk vm --since 2h --severity warning --limit 20 --follow --json",
            "hearth stats",
            "hearth stats vm --watch --json",
            "hearth top",
            "hearth top --json --once --interval 0.5",
            "hearth stats vm --since 24h --json",
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
            "hearth upgrade",
            "hearth upgrade --program /p --yes --json",
            "hearth upgrade --check",
            "hearth can-take-over -- serve --flash /a --threads 2",
            "hearth console enable",
            "hearth console enable --listen 192.0.2.1:8477 --tls-cert c --tls-key k --allow-path /srv --allow-path /dev/x --allow-server h:1",
            "hearth console disable --state-dir s",
            "hearth console show --json",
            "hearth console open --role viewer",
            "hearth console account add anna --role operator",
            "hearth console account passwd anna",
            "hearth console account remove anna",
            "hearth console account list",
            "hearth bench",
            "hearth bench --slow /srv --flash /mnt/ssd --out /tmp/r --table random,fileio --over nbd",
            "hearth bench --quick --mode write-back,write-around --depth 1,24 --rounds 5 --seconds 3 --size 1G --json",
            "hearth bench --table storm --guest /g --storms 3",
            "hearth bench compare a.json b.json --json",
            "hearth simulate a --policy hearth,lru --write-mode write-back --prefetch-latency 8000 --flash-rate 20M --format csv",
            "hearth simulate a --write-mode write-around --seq-cutoff 0 --block-size 64K --min 1G --max 2G --segments 200 --reserve 4",
            "hearth simulate a --log oldest --disk-access 100 --disk-rate 500M --in-flight 8",
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
            "hearth disk flush",
            "hearth disk flush vm --all",
            "hearth disk set vm --origin-timeout 2x",
            "hearth disk set vm --origin-timeout 2d",
            "hearth disk scrub vm --every 7h",
            "hearth serve --flash /a --flash-timeout 2d",
            "hearth names",
            "hearth trace info",
            "hearth trace record vm",
            "hearth trace replay t",
            "hearth trace replay t --to x --speed 0",
            "hearth trace replay t --to x --speed 1e-9",
            "hearth trace replay t --to x --speed 2 --depth 3",
            "hearth trace record vm --out f --for 10x",
            "hearth trace record vm --out f --stop",
            "hearth histogram vm --csv --json",
            "hearth upgrade --check --yes",
            "hearth top --interval 0",
            "hearth top --interval nan",
            "hearth can-take-over",
            "hearth console",
            "hearth console enable --listen 8477",
            "hearth console enable --tls-cert c",
            "hearth console account add anna",
            "hearth console account add anna --role root",
            "hearth console account add anna secret --role viewer",
            "hearth memory",
            "hearth memory run --guest vm1",
            "hearth memory run --guest =/q",
            "hearth bench --depth 0",
            "hearth bench --table nonsense",
            "hearth bench compare a.json",
            "hearth bench --quick compare a.json b.json",
            "hearth trace info a --format nonsense",
            "hearth trace convert a b --to keys",
            "hearth simulate",
            "hearth simulate a --disk-access 0",
            "hearth simulate a --segments 2",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    /// `hearth help disk add` is what people type after other tools.
    #[test]
    fn help_is_a_command_everywhere() {
        for line in [
            "hearth help",
            "hearth help disk",
            "hearth disk help add",
            "hearth help disk add",
        ] {
            let error = parse(line).unwrap_err();
            assert_eq!(
                error.kind(),
                clap::error::ErrorKind::DisplayHelp,
                "{line}: {error}"
            );
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
