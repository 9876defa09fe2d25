//! The host's settings, `/etc/hearth/hearth.toml`: what belongs to this machine and not to the pool.
//!
//! Listeners, threads and limits differ from host to host, while a pool is carried from one to another; so they
//! are not kept in the pool. Command lines hold them badly: a service's is in a file that a package owns. This
//! file is the administrator's. One who mistypes it is told the line, the column and what is allowed there, and
//! nothing is ever ignored: a key that nobody knows is an error.
//!
//! [`Sections`] is all that the file may hold. A service that gets settings of its own adds a section there: either
//! [`Settings`], if its keys are long options of a command (whose parser then judges the values), or a type of
//! its own that denies unknown fields.

pub mod reach;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use hearth_fault::Fault;
use serde::Deserialize;
use toml::{Spanned, Value};

/// Where the file is.
pub const PATH: &str = "/etc/hearth/hearth.toml";
/// Largest file that is read: hundreds of times what there is to say.
const SIZE_MAX: u64 = 1 << 20;

/// What the file may hold.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sections {
    /// The daemon: long options of `hearth serve`.
    #[serde(default)]
    pub serve: Settings,
    /// Who is told of what is wrong. The second service reads it and judges it.
    pub alerts: Option<toml::Table>,
    /// Where Prometheus may ask. The second service reads it and judges it.
    pub metrics: Option<toml::Table>,
    /// What users of the console may reach. The second service reads it and judges it.
    pub console: Option<toml::Table>,
    /// How smartctl reaches drives behind controllers. The second service reads it and judges it.
    pub drives: Option<toml::Table>,
    /// More guests than memory. The memory controller reads it and judges it.
    pub memory: Option<toml::Table>,
}

/// A section whose keys are the long options of a command, each with where it stands.
pub type Settings = BTreeMap<Spanned<String>, Spanned<Value>>;

/// The file as it was read.
#[derive(Clone, Debug)]
pub struct Config {
    path: PathBuf,
    text: String,
    /// What it says.
    pub sections: Sections,
}

impl Config {
    /// Reads a file. One that is not there is `None`.
    pub fn read(path: &Path) -> Result<Option<Config>, Fault> {
        let fail = |e: io::Error| {
            Fault::new(
                format!("cannot read {}: {e}", path.display()),
                "check the file and its permissions",
            )
        };
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(fail(e)),
        };
        let mut text = String::new();
        let read = file.take(SIZE_MAX + 1).read_to_string(&mut text);
        if read.map_err(fail)? as u64 > SIZE_MAX {
            return Err(Fault::new(
                format!("{} is larger than {SIZE_MAX} bytes", path.display()),
                "settings are a few lines; is this another file?",
            ));
        }
        Config::parse(path, text).map(Some)
    }

    /// Understands what a file of this name holds.
    pub fn parse(path: &Path, text: String) -> Result<Config, Fault> {
        let sections = toml::from_str(&text).map_err(|e| {
            let span = e.span().unwrap_or_default();
            let what = e.message().split('\n').collect::<Vec<_>>().join(", ");
            fault(path, &text, &span, what, "")
        })?;
        Ok(Config {
            path: path.to_owned(),
            text,
            sections,
        })
    }

    /// What is wrong at one place of the file.
    pub fn fault(
        &self,
        span: &Range<usize>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Fault {
        fault(&self.path, &self.text, span, what, remedy)
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn fault(
    path: &Path,
    text: &str,
    span: &Range<usize>,
    what: impl Into<String>,
    remedy: impl Into<String>,
) -> Fault {
    let before = text.get(..span.start).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let begin = before.rfind('\n').map_or(0, |at| at + 1);
    // As editors count.
    let column = before[begin..].chars().count() + 1;
    Fault::new(what, remedy).within(format_args!("{}:{line}:{column}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, Fault> {
        Config::parse(Path::new("f"), text.to_owned())
    }

    fn what(text: &str) -> String {
        parse(text).unwrap_err().what
    }

    #[test]
    fn settings_know_where_they_stand() {
        let text = "# ä\n[serve]\nthreads = 2\nflash = \"/f\"\n";
        let config = parse(text).unwrap();
        let found: Vec<_> = config.sections.serve.iter().collect();
        assert_eq!(found[0].0.get_ref(), "flash");
        assert_eq!(&text[found[0].0.span()], "flash");
        assert_eq!(found[1].1.get_ref(), &Value::Integer(2));
        assert_eq!(&text[found[1].1.span()], "2");
        let fault = config.fault(&found[1].1.span(), "too few", "give more");
        assert_eq!(fault.to_string(), "f:3:11: too few; give more");
    }

    #[test]
    fn errors_name_line_column_and_what_is_allowed() {
        let unknown = what("\n\n  [srve]\nthreads = 2\n");
        assert!(unknown.starts_with("f:3:4: "), "{unknown}");
        assert!(
            unknown.contains("`srve`") && unknown.contains("`serve`"),
            "{unknown}"
        );
        assert!(what("[serve]\nthreads = \n").starts_with("f:2:11: "));
        assert!(what("[serve]\nü = 1\n").starts_with("f:2:1: "));
        assert!(what("[serve]\nthreads = 1\nthreads = 2\n").starts_with("f:3:1: "));
        assert!(what("serve = 1\n").starts_with("f:1:9: "));
        // At the top of a file, outside of any section.
        assert!(what("threads = 1").starts_with("f:1:1: "));
    }

    #[test]
    fn what_the_second_service_reads_is_in_the_same_file() {
        let config = parse("[serve]\n[alerts]\nrepeat_hours = 12\n").unwrap();
        assert!(config.sections.serve.is_empty() && config.sections.alerts.is_some());
    }

    #[test]
    fn nothing_from_outside_is_too_much() {
        let tmp = std::env::temp_dir().join(format!("hearth-config-{}", std::process::id()));
        assert!(Config::read(&tmp).unwrap().is_none());
        std::fs::write(&tmp, vec![b'#'; SIZE_MAX as usize + 1]).unwrap();
        let large = Config::read(&tmp).unwrap_err();
        std::fs::write(&tmp, b"\xff\xfe").unwrap();
        let binary = Config::read(&tmp).unwrap_err();
        std::fs::remove_file(&tmp).unwrap();
        assert!(large.what.contains("larger"), "{large}");
        assert!(binary.what.contains("cannot read"), "{binary}");
        // Deep nesting is refused, and ends no stack.
        assert!(parse(&format!("serve = {}", "[".repeat(500_000))).is_err());
    }
}
