//! The command line.

use anyhow::{Context, Result, bail};
use std::path::PathBuf;

const HELP: &str = "\
hearth-bench: Hearth beside its peers

  --hearth PATH     the binary to measure (default: beside this program)
  --dir DIR         where files go; its file system is what is measured (default ./.bench)
  --out DIR         where results go (default bench/results)
  --only ID[,ID]    only these rows; a prefix is enough
  --rounds N        rounds (default 3)
  --seconds N       seconds per run (default 4)
  --disk MIB        size of disks in MiB (default 2048)
  --quick           1 round of 2 s on 512 MiB disks
  --smoke           1 round of 1 s on 64 MiB disks: proves that it runs, measures nothing
  --large           also the rows with 16 GiB cached (needs 40 GiB of disk)
  --peers-only      leave Hearth out
  --aab             the old build against itself, then against this one: is any row worse? At least
                    11 rounds; rows are asked for by their names with --only
  --old PATH        the old build's binary, for --aab
  --anew            with --aab: each run on a pool made by the build that serves it, where the old one cannot
                    open what the new one wrote
  --overcommit      guests that are assigned twice the memory there is, instead of rows: response times with
                    enough RAM and with swap on a disk, on flash, with compression, balloons, the controller.
                    Needs root. --only ram,disk,flash,zswap,balloons,controller; --seconds is for each
  --list            list the rows
  --bare-nbd FILE SOCKET   be the bare NBD loop, one of the peers (nothing else may be said)
  --bare-nfs FILE   be the bare NFS loop, likewise
";

/// What to measure, how long, and where.
#[derive(Clone, Debug)]
pub struct Args {
    /// The binary.
    pub hearth: PathBuf,
    /// Scratch directory, on the file system to measure.
    pub dir: PathBuf,
    /// Results.
    pub out: PathBuf,
    /// Rows asked for; empty means all.
    pub only: Vec<String>,
    /// Rounds.
    pub rounds: usize,
    /// Seconds per run.
    pub seconds: u64,
    /// Bytes of a disk.
    pub disk: u64,
    /// Shorten everything that is not a timed run, too.
    pub smoke: bool,
    /// With 16 GiB cached, too.
    pub large: bool,
    /// No Hearth.
    pub peers_only: bool,
    /// Compare with an old build instead ([`crate::aab`]).
    pub aab: bool,
    /// Each build makes its own pools.
    pub anew: bool,
    /// The run of an over-committed host instead ([`crate::overcommit`]).
    pub overcommit: bool,
    /// The old build.
    pub old: Option<PathBuf>,
}

impl Args {
    /// Parses; `None` if there is nothing more to do.
    pub fn parse(words: impl Iterator<Item = String>) -> Result<Option<Args>> {
        let mut args = Args {
            hearth: std::env::current_exe()?.with_file_name("hearth"),
            dir: PathBuf::from(".bench"),
            out: PathBuf::from("bench/results"),
            only: Vec::new(),
            rounds: 3,
            seconds: 4,
            disk: 2048 << 20,
            smoke: false,
            large: false,
            peers_only: false,
            aab: false,
            anew: false,
            overcommit: false,
            old: None,
        };
        let mut words = words;
        while let Some(word) = words.next() {
            let mut value = || {
                words
                    .next()
                    .with_context(|| format!("{word} needs a value"))
            };
            match word.as_str() {
                "--hearth" => args.hearth = value()?.into(),
                "--dir" => args.dir = value()?.into(),
                "--out" => args.out = value()?.into(),
                "--only" => args.only = value()?.split(',').map(str::to_owned).collect(),
                "--rounds" => args.rounds = value()?.parse::<usize>()?.max(1),
                "--seconds" => args.seconds = value()?.parse::<u64>()?.max(1),
                "--disk" => args.disk = value()?.parse::<u64>()?.max(64) << 20,
                "--quick" => (args.rounds, args.seconds, args.disk) = (1, 2, 512 << 20),
                "--smoke" => {
                    (args.rounds, args.seconds, args.disk, args.smoke) = (1, 1, 64 << 20, true);
                    args.out = args.dir.join("smoke");
                }
                "--large" => args.large = true,
                "--peers-only" => args.peers_only = true,
                "--aab" => args.aab = true,
                "--anew" => args.anew = true,
                "--overcommit" => args.overcommit = true,
                "--old" => args.old = Some(value()?.into()),
                "--list" => {
                    crate::rows::ALL
                        .iter()
                        .for_each(|row| println!("{:16} {}", row.id, row.title));
                    return Ok(None);
                }
                "--help" | "-h" => {
                    print!("{HELP}");
                    return Ok(None);
                }
                _ => bail!("unknown argument {word}\n{HELP}"),
            }
        }
        std::fs::create_dir_all(&args.dir)
            .with_context(|| format!("create {}", args.dir.display()))?;
        args.dir = args.dir.canonicalize()?;
        Ok(Some(args))
    }

    /// True if row `id` was asked for.
    pub fn wants(&self, id: &str) -> bool {
        if self.only.is_empty() {
            return !self.smoke || crate::rows::SMOKE.contains(&id);
        }
        self.only
            .iter()
            .any(|prefix| id.starts_with(prefix.as_str()))
    }
}
