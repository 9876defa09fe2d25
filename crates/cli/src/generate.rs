//! Manual pages and completions of shells, from the same definitions as `--help`.
//!
//! Whoever packages Hearth has the binary write them, so that they belong to it and nothing is built twice.

use std::io;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::{Shell, generate_to};
use hearth_daemon::error::Error;

use crate::Outcome;
use crate::args::{Cli, Generate};

pub fn run(args: &Generate) -> Outcome {
    write(&args.dir).map_err(|e| {
        Error::unavailable(
            format!("cannot write into {}: {e}", args.dir.display()),
            "name a directory you may write",
        )
    })?;
    Ok(())
}

fn write(dir: &Path) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    let mut command = Cli::command();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut command, "hearth", dir)?;
    }
    clap_mangen::generate_to(Cli::command(), dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_and_is_completed() {
        let tmp = tempfile::tempdir().unwrap();
        write(tmp.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(tmp.path().join(name)).unwrap();
        let mut command = Cli::command();
        command.build();
        let completions = ["hearth.bash", "_hearth", "hearth.fish"].map(read);
        for sub in command.get_subcommands().filter(|c| !c.is_hide_set()) {
            let page = read(&format!("hearth-{}.1", sub.get_name()));
            assert!(page.starts_with(".ie"), "{page}");
            for file in &completions {
                assert!(file.contains(sub.get_name()), "{}", sub.get_name());
            }
        }
        let page = read("hearth-disk-add.1");
        assert!(
            page.contains("origin") && page.contains("Example"),
            "{page}"
        );
        assert!(!tmp.path().join("hearth-generate.1").exists());
    }
}
