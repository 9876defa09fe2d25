//! Health, as one value for each thing that is judged.
//!
//! The daemon does not judge: drives have to be asked for it, and they may hang. Whoever gives the page out knows
//! the judgement from elsewhere and puts it in.

use std::collections::BTreeMap;

use crate::text::{Form, Kind, Page};

/// Something that was judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judged<'a> {
    /// What sort of thing, in one word.
    pub kind: &'a str,
    /// What it is called.
    pub name: &'a str,
    /// How it is: larger is worse.
    pub code: u8,
}

/// A page of the daemon's with what was judged.
pub fn with_health<'a>(
    form: Form,
    page: String,
    judged: impl Iterator<Item = Judged<'a>>,
) -> String {
    // One series twice would cost the whole scrape, and a volume may be called as a drive is.
    let mut worst: BTreeMap<(&str, &str), u8> = BTreeMap::new();
    for one in judged {
        let code = worst.entry((one.kind, one.name)).or_default();
        *code = one.code.max(*code);
    }
    // A state set would take five series of the sixty that a disk may have.
    let mut page = Page::continued(form, page);
    page.family(
        "hearth_health",
        Kind::Gauge,
        "How it is: 0 healthy, 1 unknown, 2 rebuilding, 3 degraded, 4 failed.",
    );
    for ((kind, name), code) in worst {
        page.value(&[("kind", kind), ("name", name)], f64::from(code));
    }
    page.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Pool, page};

    fn told(form: Form, judged: &[(&str, &str, u8)]) -> String {
        let judged = judged
            .iter()
            .map(|&(kind, name, code)| Judged { kind, name, code });
        with_health(form, page(form, &Pool::default(), &[]), judged)
    }

    #[test]
    fn what_was_judged_is_in_both_forms_and_nothing_twice() {
        let judged = [
            ("disk", "vm1", 3),
            ("device", "tank", 0),
            ("device", "tank", 4),
            ("pool", "p", 0),
        ];
        let open = told(Form::OpenMetrics, &judged);
        let health: Vec<&str> = open
            .lines()
            .filter(|l| l.starts_with("hearth_health{"))
            .collect();
        assert_eq!(
            health,
            [
                r#"hearth_health{kind="device",name="tank"} 4"#,
                r#"hearth_health{kind="disk",name="vm1"} 3"#,
                r#"hearth_health{kind="pool",name="p"} 0"#,
            ]
        );
        assert_eq!(open.matches("# EOF").count(), 1);
        assert!(open.ends_with("} 0\n# EOF\n"), "{open}");
        let plain = told(Form::Plain, &judged);
        assert!(!plain.contains("# EOF"));
        assert!(plain.ends_with("kind=\"pool\",name=\"p\"} 0\n"), "{plain}");
    }

    #[test]
    fn it_is_documented() {
        let docs = include_str!("../../../docs/metrics.md");
        let plain = told(Form::Plain, &[]);
        let help = plain
            .lines()
            .find_map(|l| l.strip_prefix("# HELP hearth_health "));
        let row = format!("| `hearth_health` | {} |", help.unwrap());
        assert!(docs.contains(&row), "docs/metrics.md lacks:\n{row}");
    }
}
