// text/trec.h -- relevance judgements (qrels), and what a ranking is worth by them: trec_eval's figures, as pytrec_eval gives them.
//   nDCG@k = sum over ranks r <= k of grade_r / log2(r + 1), over the same sum in the best order      Jarvelin and Kekalainen 2002
//   recall@k = relevant documents among the first k / all that are relevant.      reciprocal rank = 1 / rank of the first relevant one
// A grade above 0 is relevant. Ranks are trec_eval's: by score, and of equal scores the greater name (as bytes) comes first.
#ifndef LLMC_TEXT_TREC_H
#define LLMC_TEXT_TREC_H

#include <cmath>
#include <unordered_map>

#include "../base/common.h"

using Judgements = std::unordered_map<std::string, int>;        // {document: grade} of one query

struct Qrels {
    std::string path;
    std::unordered_map<std::string, Judgements> queries;
    size_t judgements = 0;
};

// TREC's lines "query 0 document grade", white space between them. The second field is not looked at, as in trec_eval.
inline Qrels read_qrels(const std::string& path) {
    Qrels q;
    q.path = path;
    const std::string text = read_file(path, 1u << 30);
    const char* white = " \t\r\v\f";
    size_t number = 1;
    for (size_t begin = 0; begin < text.size(); number++) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        std::string fields[5];
        int n = 0;
        for (size_t at = text.find_first_not_of(white, begin); at < end && n < 5; n++) {
            const size_t stop = std::min(text.find_first_of(" \t\r\v\f\n", at), end);
            fields[n] = text.substr(at, stop - at);
            at = text.find_first_not_of(white, stop);
        }
        check(n == 4, "%s: line %zu has %s fields, wanted 'query 0 document grade'", path.c_str(), number, n == 5 ? "more than 4" :
              std::to_string(n).c_str());
        char* rest;
        errno = 0;
        const long grade = strtol(fields[3].c_str(), &rest, 10);
        check(rest == fields[3].c_str() + fields[3].size() && errno == 0 && grade >= -1000 && grade <= 1000, "%s: line %zu: the grade '%.40s' "
              "is not a whole number from -1000 to 1000", path.c_str(), number, fields[3].c_str());
        check(q.queries[fields[0]].emplace(fields[2], (int)grade).second, "%s: line %zu: document %.80s is judged twice for query %.80s",
              path.c_str(), number, fields[2].c_str(), fields[0].c_str());
        q.judgements++;
        begin = end + 1;
    }
    check(q.judgements > 0, "%s: is empty", path.c_str());
    return q;
}

struct Ranked { float score; std::string document; };

// The grades of what was found, best first as trec_eval has it; what is not judged has grade 0.
inline std::vector<int> ranked_grades(std::vector<Ranked> found, const Judgements& judgements) {
    std::sort(found.begin(), found.end(), [](const Ranked& a, const Ranked& b) {
        return a.score > b.score || (a.score == b.score && a.document > b.document);
    });
    std::vector<int> grades;
    for (const Ranked& r : found) {
        const auto judged = judgements.find(r.document);
        grades.push_back(judged == judgements.end() ? 0 : judged->second);
    }
    return grades;
}

inline double dcg(const std::vector<int>& grades, int k) {
    double sum = 0.0;
    for (size_t r = 0; r < grades.size() && r < (size_t)k; r++) { sum += grades[r] > 0 ? grades[r] / std::log2((double)r + 2.0) : 0.0; }
    return sum;
}
inline int count_relevant(const std::vector<int>& grades, int k) {
    return (int)std::count_if(grades.begin(), grades.begin() + (long)std::min((size_t)k, grades.size()), [](int g) { return g > 0; });
}
inline std::vector<int> all_grades(const Judgements& judgements) {
    std::vector<int> grades;
    for (const auto& j : judgements) { grades.push_back(j.second); }
    std::sort(grades.rbegin(), grades.rend());
    return grades;
}

// grades: of the ranks; judgements: of the query. 0 where nothing is relevant.
inline double ndcg_at(const std::vector<int>& grades, const Judgements& judgements, int k) {
    const double ideal = dcg(all_grades(judgements), k);
    return ideal > 0.0 ? dcg(grades, k) / ideal : 0.0;
}
inline double recall_at(const std::vector<int>& grades, const Judgements& judgements, int k) {
    const int relevant = count_relevant(all_grades(judgements), INT32_MAX);
    return relevant > 0 ? (double)count_relevant(grades, k) / relevant : 0.0;
}
inline double reciprocal_rank(const std::vector<int>& grades) {
    const auto first = std::find_if(grades.begin(), grades.end(), [](int g) { return g > 0; });
    return first == grades.end() ? 0.0 : 1.0 / (double)(first - grades.begin() + 1);
}

#endif
