//! What people and programs are told.

use std::fmt::Write as _;

use hearth_health::{Condition, Kind};
use serde::{Deserialize, Serialize};

/// What is told of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum News {
    /// It has begun.
    Begun,
    /// It happened.
    Happened,
    /// It is being mended: an array has a member again that is not whole yet.
    Mends,
    /// It lasts.
    Lasts,
    /// It is over.
    Over,
    /// Somebody tries whether this arrives.
    Test,
}

/// One thing in a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// What is told of it.
    pub news: News,
    /// How bad it is, or was.
    pub condition: Condition,
    /// What sort of thing it is about.
    pub kind: Kind,
    /// What that is called.
    pub name: String,
    /// The name that stays, such as `array-degraded`.
    pub code: String,
    /// What is so, for people.
    pub what: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
    /// Since when, in milliseconds since 1970.
    pub since: u64,
}

/// What is sent at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Grows by one with each, over restarts.
    pub id: u64,
    /// When it was written, in milliseconds since 1970.
    pub at: u64,
    /// The host.
    pub host: String,
    /// What it says, the worst first.
    pub entries: Vec<Entry>,
    /// Messages that never arrived, because too many waited.
    #[serde(default)]
    pub lost_before: u64,
}

/// Text that came from elsewhere, on one line.
fn plain(text: &str) -> String {
    let shown = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(shown).collect()
}

/// Longest subject: more is cut off by programs that show it.
const SUBJECT_MAX: usize = 120;

impl Message {
    /// The line that people see first.
    pub fn subject(&self) -> String {
        let Some(first) = self.entries.first() else {
            return format!("[hearth {}]", plain(&self.host));
        };
        let word = match first.news {
            News::Over => "over".to_owned(),
            News::Test => "test".to_owned(),
            News::Lasts => format!("still {}", first.condition.word()),
            News::Begun | News::Mends => first.condition.word().to_owned(),
            News::Happened => "event".to_owned(),
        };
        let more = match self.entries.len() - 1 {
            0 => String::new(),
            n => format!(" (and {n} more)"),
        };
        let name = format!("{} {}", first.kind.word(), plain(&first.name));
        let subject = format!(
            "[hearth {}] {word}: {name}: {}",
            plain(&self.host),
            plain(&first.what)
        );
        let mut cut: String = subject.chars().take(SUBJECT_MAX - more.len()).collect();
        if cut.len() < subject.len() {
            cut.push('…');
        }
        cut + &more
    }

    /// All of it, for people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let groups = [
            (News::Begun, "What has begun"),
            (News::Happened, "What happened"),
            (News::Mends, "What is being mended"),
            (News::Over, "What is over"),
            (News::Lasts, "What lasts"),
            (News::Test, "A test"),
        ];
        for (news, heading) in groups {
            let entries: Vec<&Entry> = self.entries.iter().filter(|e| e.news == news).collect();
            if entries.is_empty() {
                continue;
            }
            let _ = writeln!(out, "{heading}:\n");
            for e in entries {
                let state = match news {
                    News::Test | News::Happened => String::new(),
                    News::Over => "no longer ".to_owned() + e.condition.word() + ": ",
                    _ => format!("{}: ", e.condition.word()),
                };
                let _ = writeln!(
                    out,
                    "* {} {}: {state}{}",
                    e.kind.word(),
                    plain(&e.name),
                    plain(&e.what)
                );
                if !e.remedy.is_empty() && news != News::Over {
                    let _ = writeln!(out, "  What to do: {}", plain(&e.remedy));
                }
                let _ = writeln!(
                    out,
                    "  {} {} ({})\n",
                    if news == News::Happened {
                        "at"
                    } else {
                        "since"
                    },
                    utc(e.since),
                    e.code
                );
            }
        }
        if self.lost_before > 0 {
            let _ = writeln!(
                out,
                "{} messages before this one could not be delivered and were given up.\n",
                self.lost_before
            );
        }
        let _ = writeln!(
            out,
            "-- \nhost {}, {}. `hearth status` and `hearth alert list` say how it is now.",
            plain(&self.host),
            utc(self.at)
        );
        out
    }

    /// The worst that it tells of as present.
    pub fn worst(&self) -> Condition {
        let present = self.entries.iter().filter(|e| e.news != News::Over);
        present
            .map(|e| e.condition)
            .max()
            .unwrap_or(Condition::Healthy)
    }
}

/// Milliseconds since 1970 as people write them.
pub fn utc(ms: u64) -> String {
    let seconds = ms / 1000;
    let (days, rest) = ((seconds / 86_400) as i64, seconds % 86_400);
    // Days since 0000-03-01, in eras of 400 years.
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = yoe + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_and_then_all_of_it() {
        let entry = |news, what: &str| Entry {
            news,
            condition: Condition::Failed,
            kind: Kind::Disk,
            name: "vm\r\nBcc: x".to_owned(),
            code: "data-lost".to_owned(),
            what: what.to_owned(),
            remedy: "do".to_owned(),
            since: 951_782_400_000,
        };
        let message = Message {
            id: 1,
            at: 951_782_400_000,
            host: "h".to_owned(),
            entries: vec![
                entry(News::Begun, "lost"),
                Entry {
                    condition: Condition::Rebuilding,
                    remedy: String::new(),
                    ..entry(News::Mends, "half done")
                },
                entry(News::Over, &"x".repeat(300)),
            ],
            lost_before: 0,
        };
        assert_eq!(
            message.subject(),
            "[hearth h] failed: disk vm  Bcc: x: lost (and 2 more)"
        );
        let text = message.text();
        assert!(text.contains("What has begun:\n\n* disk vm  Bcc: x: failed: lost\n  What to do: do\n  since 2000-02-29 00:00:00 UTC (data-lost)"), "{text}");
        assert!(
            text.contains(
                "What is being mended:\n\n* disk vm  Bcc: x: rebuilding: half done\n  since"
            ),
            "{text}"
        );
        assert!(text.contains("no longer failed"), "{text}");
        assert_eq!(message.worst(), Condition::Failed);
    }
}
