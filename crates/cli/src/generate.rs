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
        let file = generate_to(shell, &mut command, "hearth", dir)?;
        let text = std::fs::read_to_string(&file)?;
        std::fs::write(&file, with_names(shell, text, &named(&command)))?;
    }
    clap_mangen::generate_to(Cli::command(), dir)
}

/// What a command's first argument names, by how its help begins.
const KINDS: [(&str, &str); 4] = [
    ("The disk or datastore", "any"),
    ("The disk", "disk"),
    ("The datastore", "datastore"),
    ("Only this disk", "disk"),
];

/// A command whose first argument is the name of something that is there.
struct Naming {
    /// The words before the name.
    words: Vec<String>,
    /// What `hearth names` is asked for.
    kind: &'static str,
}

/// All commands that take a name.
fn named(command: &clap::Command) -> Vec<Naming> {
    fn walk(command: &clap::Command, words: &[String], found: &mut Vec<Naming>) {
        let is_shown = |c: &&clap::Command| !c.is_hide_set() && c.get_name() != "help";
        for sub in command.get_subcommands().filter(is_shown) {
            let words = [words, &[sub.get_name().to_owned()]].concat();
            let help = |arg: &clap::Arg| arg.get_help().map(ToString::to_string);
            let first = sub.get_positionals().next().and_then(help);
            let kind = first.and_then(|help| {
                let fits = KINDS.iter().find(|(start, _)| help.starts_with(start));
                fits.map(|(_, kind)| *kind)
            });
            if let Some(kind) = kind {
                found.push(Naming {
                    words: words.clone(),
                    kind,
                });
            }
            walk(sub, &words, found);
        }
    }
    let mut found = Vec::new();
    walk(command, &[], &mut found);
    found
}

/// A shell's completions that ask the daemon for names of disks and datastores.
fn with_names(shell: Shell, mut text: String, named: &[Naming]) -> String {
    match shell {
        Shell::Bash => {
            let cases = named.iter().map(|n| {
                let (words, at) = (n.words.join(" "), n.words.len() + 1);
                format!(
                    "        \"{words} \"*) [ \"$COMP_CWORD\" -eq {at} ] && kind={} ;;\n",
                    n.kind
                )
            });
            text.push_str(&format!(
                "\n_hearth_with_names() {{\n    local kind=''\n    _hearth \"$@\"\n    \
                 case \"${{COMP_WORDS[*]:1}} \" in\n{}    esac\n    \
                 [ -n \"$kind\" ] || return 0\n    case \"$2\" in -*) return 0 ;; esac\n    \
                 COMPREPLY=($(compgen -W \"$(hearth names \"$kind\" 2>/dev/null)\" -- \"$2\"))\n}}\n\
                 complete -F _hearth_with_names -o nosort -o bashdefault -o default hearth\n",
                cases.collect::<String>()
            ));
        }
        Shell::Zsh => {
            let mut functions = String::new();
            for (start, kind) in KINDS {
                for end in [":_default'", ":'"] {
                    let of = format!("-- {start}");
                    text = text
                        .lines()
                        .map(|line| {
                            let body = line.trim_end_matches(" \\");
                            match body.strip_suffix(end).filter(|b| b.contains(&of)) {
                                Some(body) => format!("{body}:_hearth_names_{kind}' \\\n"),
                                None => format!("{line}\n"),
                            }
                        })
                        .collect();
                }
            }
            for kind in ["any", "disk", "datastore"] {
                functions.push_str(&format!(
                    "_hearth_names_{kind}() {{\n    local -a names\n    \
                     names=(${{(f)\"$(hearth names {kind} 2>/dev/null)\"}})\n    compadd -a names\n}}\n\n"
                ));
            }
            // Before the last lines, which run the completion.
            let at = text
                .find("\nif [ \"$funcstack[1]\"")
                .map_or(text.len(), |at| at + 1);
            text.insert_str(at, &functions);
        }
        Shell::Fish => {
            for n in named {
                let seen = n
                    .words
                    .iter()
                    .map(|word| format!("__fish_seen_subcommand_from {word}"));
                let seen = seen.collect::<Vec<_>>().join("; and ");
                text.push_str(&format!(
                    "complete -c hearth -n \"{seen}\" -f -a \"(hearth names {} 2>/dev/null)\"\n",
                    n.kind
                ));
            }
        }
        _ => {}
    }
    text
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
        let is_shown = |c: &&clap::Command| !c.is_hide_set() && c.get_name() != "help";
        for sub in command.get_subcommands().filter(is_shown) {
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

    /// Has bash complete a line, with a `hearth` that knows two disks and a datastore.
    fn completed(dir: &Path, line: &str) -> Vec<String> {
        let script = format!(
            "PATH={0}:$PATH; . {0}/hearth.bash; COMP_WORDS=({line} ''); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _hearth_with_names hearth '' \"${{COMP_WORDS[COMP_CWORD-1]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            dir.display()
        );
        let out = std::process::Command::new("bash")
            .args(["-c", &script])
            .output()
            .unwrap();
        assert!(
            out.stderr.is_empty(),
            "{line}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        String::from_utf8(out.stdout)
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn names_of_disks_are_completed() {
        use std::os::unix::fs::PermissionsExt;
        let tmp = tempfile::tempdir().unwrap();
        write(tmp.path()).unwrap();
        let hearth = tmp.path().join("hearth");
        let names = "#!/bin/sh\n[ \"$1\" = names ] || exit 1\ncase $2 in disk | any) echo vm1; echo vm2 ;; esac\n\
            case $2 in datastore | any) echo vms ;; esac\n";
        std::fs::write(&hearth, names).unwrap();
        std::fs::set_permissions(&hearth, std::fs::Permissions::from_mode(0o755)).unwrap();
        for line in [
            "hearth disk show",
            "hearth disk remove",
            "hearth disk flush",
            "hearth stats",
            "hearth histogram",
            "hearth trace record",
        ] {
            assert_eq!(completed(tmp.path(), line), ["vm1", "vm2"], "{line}");
        }
        assert_eq!(completed(tmp.path(), "hearth datastore show"), ["vms"]);
        assert_eq!(
            completed(tmp.path(), "hearth attach-help"),
            ["vm1", "vm2", "vms"]
        );
        for line in ["hearth disk", "hearth disk add", "hearth disk show vm1"] {
            let all = completed(tmp.path(), line);
            assert!(!all.contains(&"vm1".to_owned()), "{line}: {all:?}");
        }
        let read = |name: &str| std::fs::read_to_string(tmp.path().join(name)).unwrap();
        let (zsh, fish) = (read("_hearth"), read("hearth.fish"));
        assert!(
            zsh.contains("-- The disk:_hearth_names_disk' \\\n"),
            "{zsh}"
        );
        assert!(zsh.contains("_hearth_names_datastore() {"), "{zsh}");
        let wanted = "__fish_seen_subcommand_from disk; and __fish_seen_subcommand_from show\" -f -a \"(hearth names disk";
        assert!(fish.contains(wanted), "{fish}");
    }
}
