//! The screen of `hearth top`: rows in an order, a place in them, and how it is drawn.

use std::collections::{BTreeMap, VecDeque};

use hearth_daemon::size::human;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row as Cells, Table};

use super::sample::{Row, Sample};
use crate::table::{cut, plain};

/// Samples of the past that are drawn, and on how many columns all of them: on fewer, names have more need of the room.
const PAST: usize = 16;
const FEW: usize = 8;
const WIDE: u16 = 96;
/// Columns of what is beside the name and the past, with one between each two.
const NUMBERS: [u16; 6] = [8, 8, 5, 6, 9, 9];
/// Heights of a bar, from nothing on.
const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const KEYS: &str = "sort by: n name  r reads  w writes  h hits  l latency  c cached  d dirty";
const MORE_KEYS: &str = "the same key again: the other way round   ↑ ↓ PgUp PgDn move   q quit";

/// What rows are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Name,
    Reads,
    Writes,
    Hits,
    Latency,
    Cached,
    Dirty,
}

impl Order {
    fn of(letter: char) -> Option<Order> {
        Some(match letter {
            'n' => Order::Name,
            'r' => Order::Reads,
            'w' => Order::Writes,
            'h' => Order::Hits,
            'l' => Order::Latency,
            'c' => Order::Cached,
            'd' => Order::Dirty,
            _ => return None,
        })
    }

    fn value(self, row: &Row) -> f64 {
        match self {
            Order::Name => 0.0,
            Order::Reads => row.reads_per_second,
            Order::Writes => row.writes_per_second,
            // What was not asked for anything comes behind all others.
            Order::Hits => row.read_hit_ratio.unwrap_or(-1.0),
            Order::Latency => row.read_mean_us.unwrap_or(-1.0),
            Order::Cached => row.cached as f64,
            Order::Dirty => row.dirty as f64,
        }
    }
}

/// See the module.
pub struct View {
    sample: Sample,
    /// Requests a second of each disk, the newest last.
    past: BTreeMap<String, VecDeque<f64>>,
    order: Order,
    reversed: bool,
    /// Rows above the first one shown.
    above: usize,
    message: String,
}

impl Default for View {
    fn default() -> View {
        View {
            sample: Sample::default(),
            past: BTreeMap::new(),
            order: Order::Reads,
            reversed: false,
            above: 0,
            message: String::new(),
        }
    }
}

impl View {
    /// There is nothing to show before the second look.
    pub fn wait_for_more(&mut self) {
        "measuring …".clone_into(&mut self.message);
    }

    /// Takes what is new.
    pub fn take(&mut self, sample: Sample) {
        self.message.clear();
        self.past
            .retain(|name, _| sample.disks.iter().any(|row| row.name == *name));
        for row in &sample.disks {
            let past = self.past.entry(row.name.clone()).or_default();
            past.push_back(row.reads_per_second + row.writes_per_second);
            while past.len() > PAST {
                past.pop_front();
            }
        }
        self.sample = sample;
        self.scroll(0);
    }

    /// What keeps from knowing anything new.
    pub fn trouble(&mut self, why: String) {
        self.message = plain(&why);
    }

    /// A key was pressed.
    pub fn key(&mut self, letter: char) {
        if let Some(order) = Order::of(letter) {
            self.reversed = self.order == order && !self.reversed;
            self.order = order;
            self.above = 0;
        }
    }

    /// Moves by so many rows.
    pub fn scroll(&mut self, rows: isize) {
        let last = self.sample.disks.len().saturating_sub(1);
        self.above = self.above.saturating_add_signed(rows).min(last);
    }

    fn sorted(&self) -> Vec<&Row> {
        let mut rows: Vec<&Row> = self.sample.disks.iter().collect();
        rows.sort_by(|a, b| {
            let most_first = self.order.value(b).total_cmp(&self.order.value(a));
            let order = most_first.then_with(|| a.name.cmp(&b.name));
            if self.reversed {
                order.reverse()
            } else {
                order
            }
        });
        rows
    }

    /// Draws everything.
    pub fn draw(&self, frame: &mut Frame<'_>) {
        let [head, table, foot] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Min(0),
            Constraint::Length(2),
        ])
        .areas(frame.area());
        frame.render_widget(Paragraph::new(self.head()), head);
        let heading = |order: Order, text: &'static str| {
            let style = if order == self.order {
                Style::new().add_modifier(Modifier::REVERSED | Modifier::BOLD)
            } else {
                Style::new().add_modifier(Modifier::BOLD)
            };
            Cell::from(text).style(style)
        };
        let headings = Cells::new([
            heading(Order::Name, "disk"),
            heading(Order::Reads, " reads/s"),
            heading(Order::Writes, "writes/s"),
            heading(Order::Hits, " hits"),
            heading(Order::Latency, "  read"),
            heading(Order::Cached, "   cached"),
            heading(Order::Dirty, "    dirty"),
            Cell::from("requests"),
        ]);
        let past = if table.width < WIDE { FEW } else { PAST };
        let others: u16 = NUMBERS.iter().map(|width| width + 1).sum();
        let name = usize::from(table.width.saturating_sub(others + 1)).saturating_sub(past);
        let shown = self.sorted().into_iter().skip(self.above);
        let rows = shown.take(usize::from(table.height)).map(|row| {
            Cells::new([
                cut(&plain(&row.name), name),
                format!("{:>8.0}", row.reads_per_second),
                format!("{:>8.0}", row.writes_per_second),
                row.read_hit_ratio
                    .map_or_else(|| "    -".to_owned(), |r| format!("{:>4.0}%", r * 100.0)),
                row.read_mean_us.map_or_else(|| "     -".to_owned(), time),
                format!("{:>9}", human(row.cached)),
                format!("{:>9}", human(row.dirty)),
                self.bars(&row.name, past),
            ])
        });
        let numbers = NUMBERS.map(Constraint::Length);
        let widths = std::iter::once(Constraint::Min(10))
            .chain(numbers)
            .chain([Constraint::Length(past as u16)]);
        frame.render_widget(Table::new(rows, widths).header(headings), table);
        frame.render_widget(
            Paragraph::new(vec![Line::from(KEYS), Line::from(MORE_KEYS)]),
            foot,
        );
    }

    /// What all do together, and what there is to say or else what is on flash.
    fn head(&self) -> Vec<Line<'static>> {
        let sum = |of: fn(&Row) -> f64| self.sample.disks.iter().map(of).sum::<f64>();
        let count = self.sample.disks.len();
        let all = format!(
            "{count} {}   {:.0} reads/s   {:.0} writes/s",
            if count == 1 { "disk" } else { "disks" },
            sum(|r| r.reads_per_second),
            sum(|r| r.writes_per_second),
        );
        let below = if !self.message.is_empty() {
            self.message.clone()
        } else if count == 0 {
            "there is none yet; `hearth disk add NAME --origin PATH` adds one".to_owned()
        } else {
            format!(
                "cached {} of {}   dirty {}",
                human(self.sample.cached),
                human(self.sample.capacity),
                human(self.sample.dirty)
            )
        };
        vec![Line::from(all), Line::from(below)]
    }

    /// A disk's requests, the newest so many, each bar as high as its share of the most.
    fn bars(&self, name: &str, shown: usize) -> String {
        let Some(past) = self.past.get(name) else {
            return String::new();
        };
        let most = past.iter().copied().fold(0.0, f64::max);
        let bar = |value: &f64| {
            let share = if most > 0.0 { value / most } else { 0.0 };
            let height = (share * (BARS.len() - 1) as f64).ceil() as usize;
            BARS.get(height).copied().unwrap_or(' ')
        };
        let missing = std::iter::repeat_n(' ', shown.saturating_sub(past.len()));
        let newest = past.iter().skip(past.len().saturating_sub(shown));
        missing.chain(newest.map(bar)).collect()
    }
}

/// A latency, in six places.
fn time(us: f64) -> String {
    match us {
        us if us < 1000.0 => format!("{us:>4.0}µs"),
        us if us < 99_900.0 => format!("{:>4.1}ms", us / 1e3),
        us if us < 1e6 => format!("{:>4.0}ms", us / 1e3),
        us => format!("{:>5.0}s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn row(name: &str, reads: f64, dirty: u64) -> Row {
        Row {
            name: name.to_owned(),
            reads_per_second: reads,
            read_hit_ratio: Some(0.97),
            read_mean_us: Some(123.0),
            dirty,
            ..Row::default()
        }
    }

    fn drawn(view: &View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect();
        (0..height).map(line).collect()
    }

    fn names(view: &View) -> Vec<String> {
        let lines = drawn(view, 80, 24);
        let rows = lines[3..22]
            .iter()
            .map(|l| l.split(' ').next().unwrap_or_default().to_owned());
        rows.filter(|name| !name.is_empty()).collect()
    }

    fn three() -> View {
        let mut view = View::default();
        view.take(Sample {
            disks: vec![
                row("a", 5.0, 3 << 20),
                row("b", 50.0, 1 << 20),
                row("c", 0.5, 2 << 20),
            ],
            capacity: 1 << 30,
            ..Sample::default()
        });
        view
    }

    #[test]
    fn everything_is_on_a_small_screen() {
        let mut view = three();
        for reads in [25.0, 100.0] {
            view.take(Sample {
                disks: vec![row("b", reads, 0)],
                ..Sample::default()
            });
        }
        let lines = drawn(&view, 80, 24);
        assert!(lines[0].starts_with("1 disk  "), "{}", lines[0]);
        for heading in [
            "disk", "reads/s", "writes/s", "hits", "read", "cached", "dirty", "requests",
        ] {
            assert!(lines[2].contains(heading), "{heading}: {}", lines[2]);
        }
        assert!(
            lines[3].contains("97%") && lines[3].contains("123µs"),
            "{}",
            lines[3]
        );
        assert!(lines[3].trim_end().ends_with("▄▂█"), "{}", lines[3]);
        assert!(
            lines[22].contains("sort by") && lines[23].contains("q quit"),
            "{lines:?}"
        );
        // Smaller ones show less, and nothing breaks.
        for (width, height) in [(1, 1), (20, 3), (80, 4), (200, 60)] {
            drawn(&view, width, height);
        }
    }

    #[test]
    fn large_figures_and_long_names_fit_as_well() {
        let mut view = View::default();
        let name = "datastore/machines/database-of-accounts-flat.vmdk";
        for _ in 0..PAST + 1 {
            view.take(Sample {
                disks: (0..500)
                    .map(|_| Row {
                        writes_per_second: 1e6,
                        cached: 999 << 30,
                        ..row(name, 1e6, 999 << 30)
                    })
                    .collect(),
                capacity: 999 << 40,
                cached: 999 << 40,
                dirty: 999 << 30,
                ..Sample::default()
            });
        }
        let lines = drawn(&view, 80, 24);
        let text = lines.join("\n");
        for whole in [
            "500 disks   500000000 reads/s   500000000 writes/s ",
            "dirty 999 GiB ",
        ] {
            assert!(text.contains(whole), "{text}");
        }
        assert!(lines[3].starts_with("datastore/machines/… "), "{text}");
        assert!(lines[3].ends_with(&"█".repeat(FEW)), "{text}");
        let wide = drawn(&view, 160, 24);
        assert!(
            wide[3].starts_with(name) && wide[3].ends_with(&"█".repeat(PAST)),
            "{wide:?}"
        );
    }

    #[test]
    fn without_disks_it_says_how_to_add_one() {
        let mut view = View::default();
        view.take(Sample::default());
        assert!(drawn(&view, 80, 24)[1].contains("hearth disk add"));
        view.trouble("the daemon is gone".to_owned());
        assert!(drawn(&view, 80, 24)[1].contains("the daemon is gone"));
    }

    #[test]
    fn rows_are_sorted_and_moved() {
        let mut view = three();
        assert_eq!(names(&view), ["b", "a", "c"]);
        view.key('r');
        assert_eq!(names(&view), ["c", "a", "b"]);
        view.key('d');
        assert_eq!(names(&view), ["a", "c", "b"]);
        view.key('n');
        assert_eq!(names(&view), ["a", "b", "c"]);
        view.scroll(1);
        assert_eq!(names(&view), ["b", "c"]);
        view.scroll(100);
        assert_eq!(names(&view), ["c"]);
        view.scroll(isize::MIN);
        view.key('x');
        assert_eq!(names(&view), ["a", "b", "c"]);
    }

    #[test]
    fn what_others_named_does_not_reach_the_terminal_raw() {
        let mut view = View::default();
        view.take(Sample {
            disks: vec![row("a\u{1b}[2J", 1.0, 0)],
            ..Sample::default()
        });
        view.trouble("no\u{7} daemon".to_owned());
        let text = drawn(&view, 80, 24).concat();
        assert!(!text.contains(['\u{1b}', '\u{7}']), "{text}");
        assert!(text.contains("daemon"), "{text}");
    }

    #[test]
    fn latencies_have_six_places() {
        for us in [0.4, 999.9, 1500.0, 99_000.0, 99_950.0, 999_999.0, 2e6, 9e9] {
            assert_eq!(time(us).chars().count(), 6, "{us}");
        }
    }
}
